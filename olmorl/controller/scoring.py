"""From finished samples to verdicts: what to ask the verifiers, and what their answers mean for a sample."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields

from transformers import PreTrainedTokenizerFast

from olmorl.config.data_sections import RewardSection
from olmorl.contract.generation import RolloutSample
from olmorl.controller.driver_log import TRACEBACK
from olmorl.controller.environments import Environments
from olmorl.controller.group import ScoredSample
from olmorl.controller.truth_check import check_truths
from olmorl.data.prompt import Check, EncodedExample, Prompt
from olmorl.rewards.combine import combine
from olmorl.rewards.pool import VerifierPool
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Verdict, VerifierJob
from olmorl.rewards.verifier import canonical_name, choose_verifiers

log = logging.getLogger(__name__)

MEANINGS = {
    "drop_sample": "such samples are not trained",
    "drop_group": "groups with such a sample are not trained",
    "zero": "such samples count as 0",
}


def verifiers_to_load(section: RewardSection, named: Iterable[str | None]) -> tuple[str, ...]:
    """Those that the rows name, after reward.remap. Raises ConfigError: a row names none, or one that does not
    exist."""
    names = choose_verifiers(section.remap.get(name or "", name) for name in named)
    for name in names:
        canonical_name(name)
    return names


def full_reward(section: RewardSection, checks: Sequence[Check]) -> float:
    """What all of a row's verifiers give together at most."""
    weights = _weights(section)
    names = (section.remap.get(check.verifier, check.verifier) for check in checks if check.verifier is not None)
    return sum(max(weights.get(canonical_name(name), 1.0), 0.0) for name in names)


def _weights(section: RewardSection) -> dict[str, float]:
    return {canonical_name(name): weight for name, weight in section.weights.items()}


def verifier_settings(section: RewardSection) -> VerifierSettings:
    """What the config leaves open comes from the environment."""
    names = {field.name for field in fields(VerifierSettings)} & set(RewardSection.model_fields)
    said = {name: value for name in names if (value := getattr(section, name)) is not None}
    return VerifierSettings(**said)


class Scorer:
    """Scores samples in the verifier processes of `pool`."""

    def __init__(self, pool: VerifierPool, *, section: RewardSection, environments: Environments | None = None) -> None:
        self._pool = pool
        self.environments = environments
        self._remap = section.remap
        self._weights = _weights(section)
        self._seconds = 0.0
        self._unscored = section.unscored
        self._told: set[tuple[str, str]] = set()

    @classmethod
    async def start(
        cls,
        section: RewardSection,
        *,
        verifiers: Sequence[str],
        environments: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> "Scorer":
        """Environments need the `tokenizer` of the model. Raises ConfigError."""
        settings = verifier_settings(section)
        timeout = section.timeout_seconds
        pool = VerifierPool(verifiers, workers=section.workers, timeout_seconds=timeout, settings=settings)
        await pool.start()
        if not environments:
            return cls(pool, section=section)
        assert tokenizer is not None, "environments need a tokenizer"
        try:
            started = await Environments.start(
                environments, tokenizer=tokenizer, workers=section.workers, timeout_seconds=timeout, settings=settings
            )
        except BaseException:
            await pool.close()
            raise
        return cls(pool, section=section, environments=started)

    async def check_truths(self, examples: Sequence[EncodedExample]) -> None:
        """Raises DataError if a ground truth cannot be judged by its verifier."""
        await check_truths(self._pool, examples, remap=self._remap)

    async def score(self, prompt: Prompt, samples: Sequence[RolloutSample]) -> list[ScoredSample]:
        """In the order of `samples`. What an engine gave up is an error, never a wrong answer."""
        whole = [s for s in samples if s.finish_reason != "abort"]
        started = time.perf_counter()
        verdicts = await asyncio.gather(*(self._judge(prompt, sample) for sample in whole))
        self._seconds += time.perf_counter() - started
        by_index = dict(zip((s.sample_index for s in whole), verdicts, strict=True))
        scored = []
        for sample in samples:
            verdict = by_index.get(sample.sample_index)
            if verdict is None:
                detail = sample.error or "aborted by the engine"
                scored.append(ScoredSample(sample=sample, reward=None, verdict="error", detail=detail))
            else:
                scored.append(
                    ScoredSample(sample=sample, reward=verdict.reward, verdict=verdict.status, detail=verdict.detail)
                )
        return scored

    def tell_of(self, verdict: Verdict, *, of: str, prompt: Prompt) -> None:
        """A verdict that is no score is easily overlooked: the first of each kind, of each verifier or environment, is
        said aloud."""
        if verdict.status != "scored" and (of, verdict.status) not in self._told:
            self._told.add((of, verdict.status))
            meaning = MEANINGS[self._unscored[verdict.status]]
            place = prompt.place or prompt.prompt_id
            also = {TRACEBACK: verdict.traceback}
            log.warning("%s: %s: verdict %r (%s); %s", place, of, verdict.status, verdict.detail, meaning, extra=also)

    async def _judge(self, prompt: Prompt, sample: RolloutSample) -> Verdict:
        names = []
        for check in prompt.checks:
            assert check.verifier is not None, f"{prompt.prompt_id} names no verifier"
            names.append(self._remap.get(check.verifier, check.verifier))
        jobs = [
            VerifierJob(
                verifier=name,
                completion=sample.text,
                ground_truth=check.ground_truth,
                prompt=prompt.text,
                num_tokens=len(sample.token_ids),
            )
            for name, check in zip(names, prompt.checks, strict=True)
        ]
        weights = [self._weights.get(canonical_name(name), 1.0) for name in names]
        verdicts = await self._pool.score(jobs)
        for name, verdict in zip(names, verdicts, strict=True):
            self.tell_of(verdict, of=name, prompt=prompt)
        return combine(verdicts, weights, names=names)

    def outage(self) -> tuple[float, str]:
        """For how many seconds a judge or code server has been down, and what it said last; 0 if none is."""
        return self._pool.outage()

    def drain_seconds(self) -> float:
        """Seconds that samples waited for verdicts since the last call, added up over concurrent calls."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def close(self) -> None:
        await self._pool.close()
        if self.environments is not None:
            await self.environments.close()
