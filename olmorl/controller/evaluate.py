"""Evaluation on one policy version: its prompts go ahead of training prompts, its weights do not change meanwhile.

The caller publishes no new weights before `evaluate` returns; that is what pins the version.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, SyncError
from olmorl.contract.generation import OBSERVED, SamplingParams
from olmorl.controller.group import Fate, Group, ScoredSample
from olmorl.controller.loop import request_seed
from olmorl.controller.rollout import RolloutService
from olmorl.controller.sampling import sample_prompt
from olmorl.controller.scoring import Scorer, full_reward
from olmorl.data.prompt import Prompt
from olmorl.data.prompt_set import check_lengths, load_prompts
from olmorl.data.source import source_name
from olmorl.data.stream import PromptStream
from olmorl.data.tokenizer import PromptEncoder
from olmorl.metrics.pass_at_k import Estimate, avg_at_k, pass_at_k

PRIORITY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    name: str
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one policy version made of one set. Rewards are unscaled."""

    set: EvalSet
    version: int
    groups: tuple[Group, ...]
    """one for each prompt, in order"""

    @cached_property
    def samples(self) -> list[ScoredSample]:
        return [s for group in self.groups for s in group.samples]

    @property
    def k(self) -> int:
        return self.set.samples_per_prompt

    @cached_property
    def rewards(self) -> list[list[float]]:
        """Of the samples that have one, prompt by prompt."""
        return [[s.reward for s in group.samples if s.reward is not None] for group in self.groups]

    @cached_property
    def avg_at_k(self) -> Estimate:
        return avg_at_k(self.rewards)

    def pass_at(self, k: int) -> Estimate:
        return pass_at_k([list(map(float, group.passed)) for group in self.groups], k)

    @property
    def num_unscored(self) -> int:
        return len(self.samples) - sum(map(len, self.rewards))

    @property
    def num_tokens(self) -> int:
        return int(sum(self.lengths))

    @property
    def lengths(self) -> np.ndarray:
        """[samples] tokens drawn for each response."""
        return np.array([s.num_drawn for s in self.samples])

    @property
    def truncated_fraction(self) -> float:
        return float(np.mean([s.sample.finish_reason == "length" for s in self.samples]))


def load_eval_sets(config: Config, encoder: PromptEncoder) -> tuple[EvalSet, ...]:
    """The sets of eval.data, whole or as far as eval.limit. Raises DataError, and ConfigError for a name used twice."""
    section, sets = config.eval, []
    for source in section.data:
        prompts = load_prompts(
            [source],
            encoder=encoder,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            verifiers=config.reward.verifier if source.verifier is None else None,
            full_reward=partial(full_reward, config.reward),
        )
        samples = source.samples_per_prompt or section.samples_per_prompt
        check_lengths(prompts.examples, samples_per_prompt=samples)
        stream = PromptStream(prompts, seed=0, shuffle=False)
        count = min(len(prompts), section.limit or len(prompts))
        sets.append(
            EvalSet(
                name=source_name(source).replace("/", "_"),
                prompts=tuple(stream.next() for _ in range(count)),
                samples_per_prompt=samples,
            )
        )
    names = [one.name for one in sets]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"eval.data has two sets called {name!r}; give each a `name` of its own")
    return tuple(sets)


async def evaluate(
    sets: Sequence[EvalSet],
    *,
    config: Config,
    service: RolloutService,
    scorer: Scorer,
    version: int,
    on_scored: Callable[[int], None] = lambda count: None,
) -> list[Evaluation]:
    """Sample every prompt of every set and score it, all at once. Raises SyncError if any token is of another version.

    `on_scored` is told how many samples more are done.
    """

    async def sample(one: EvalSet, order: int, prompt: Prompt) -> Group:
        request_id = f"eval/{one.name}/{prompt.prompt_id}"
        seed = request_seed(config.eval.seed, prompt)
        group = Group(prompt=prompt, order=order, admitted_version=version, seed=seed, t_admitted=time.time())
        params = eval_params(config, n=one.samples_per_prompt, seed=seed)

        def deliver(scored: list[ScoredSample]) -> None:
            group.samples += scored
            on_scored(len(scored))

        await sample_prompt(
            prompt,
            request_id=request_id,
            params=params,
            priority=PRIORITY,
            service=service,
            scorer=scorer,
            deliver=deliver,
        )
        group.samples.sort(key=lambda s: s.sample.sample_index)
        for s in group.samples:
            s.fate = Fate.EVAL
        return group

    async def run(one: EvalSet) -> Evaluation:
        groups = await asyncio.gather(*(sample(one, order, prompt) for order, prompt in enumerate(one.prompts)))
        return Evaluation(set=one, version=version, groups=tuple(groups))

    evaluations = await asyncio.gather(*(run(one) for one in sets))
    for evaluation in evaluations:
        _check_version(evaluation)
    return evaluations


def eval_params(config: Config, *, n: int, seed: int) -> SamplingParams:
    """The seed of a prompt is the same at every evaluation, so that two versions differ by their weights alone."""
    section = config.eval
    return SamplingParams(
        n=n,
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
        max_tokens=section.max_response_tokens or config.rollout.max_response_tokens,
        stop=config.sampling.stop,
        seed=seed,
    )


def _check_version(evaluation: Evaluation) -> None:
    spans = (span for s in evaluation.samples for span in s.sample.version_spans)
    others = {version for version, *_ in spans} - {evaluation.version, OBSERVED}
    if others:
        raise SyncError(f"evaluation of version {evaluation.version} met tokens of version {sorted(others)}")
