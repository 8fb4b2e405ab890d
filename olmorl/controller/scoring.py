"""From finished samples to verdicts: what to ask the verifiers, and what their answers mean for a sample."""

import time
from collections.abc import Sequence

from olmorl.config.schema import RewardSection
from olmorl.contract.generation import RolloutSample
from olmorl.controller.group import ScoredSample
from olmorl.data.prompt import Prompt
from olmorl.rewards.pool import VerifierPool
from olmorl.rewards.verdict import VerifierJob


class Scorer:
    """Scores samples in the verifier processes of `pool`."""

    def __init__(self, pool: VerifierPool, *, verifier: str | None) -> None:
        self._pool = pool
        self._verifier = verifier
        self._seconds = 0.0

    @classmethod
    async def start(cls, section: RewardSection, *, verifiers: Sequence[str]) -> "Scorer":
        pool = VerifierPool(verifiers, workers=section.workers, timeout_seconds=section.timeout_seconds)
        await pool.start()
        return cls(pool, verifier=section.verifier)

    async def score(self, prompt: Prompt, samples: Sequence[RolloutSample]) -> list[ScoredSample]:
        """In the order of `samples`. What an engine gave up is an error, never a wrong answer."""
        verifier = self._verifier or prompt.verifier
        assert verifier is not None, f"{prompt.prompt_id} names no verifier"
        whole = [s for s in samples if s.finish_reason != "abort"]
        started = time.perf_counter()
        jobs = [
            VerifierJob(verifier=verifier, completion=s.text, ground_truth=prompt.ground_truth, prompt=prompt.text)
            for s in whole
        ]
        verdicts = dict(zip((s.sample_index for s in whole), await self._pool.score(jobs), strict=True))
        self._seconds += time.perf_counter() - started
        scored = []
        for sample in samples:
            verdict = verdicts.get(sample.sample_index)
            if verdict is None:
                detail = sample.error or "aborted by the engine"
                scored.append(ScoredSample(sample=sample, reward=None, verdict="error", detail=detail))
            else:
                scored.append(
                    ScoredSample(sample=sample, reward=verdict.reward, verdict=verdict.status, detail=verdict.detail)
                )
        return scored

    def drain_seconds(self) -> float:
        """Seconds that samples waited for verdicts since the last call, added up over concurrent calls."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def close(self) -> None:
        await self._pool.close()
