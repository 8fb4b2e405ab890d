"""Evaluation on one policy version: its prompts go ahead of training prompts, its weights do not change meanwhile.

The caller publishes no new weights before `evaluate` returns; that is what pins the version.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olmorl.config.schema import Config
from olmorl.contract.errors import SyncError
from olmorl.contract.generation import OBSERVED, SamplingParams
from olmorl.controller.group import ScoredSample
from olmorl.controller.loop import request_seed
from olmorl.controller.rollout import RolloutService
from olmorl.controller.sampling import sample_prompt
from olmorl.controller.scoring import Scorer
from olmorl.data.prompt import Prompt

PRIORITY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    version: int
    avg_at_k: float
    standard_error: float  # of avg_at_k over prompts
    pass_at_k: float
    k: int
    num_prompts: int
    num_unscored: int
    num_tokens: int
    seconds: float


async def evaluate(
    prompts: Sequence[Prompt], *, config: Config, service: RolloutService, scorer: Scorer, version: int
) -> Evaluation:
    """Sample every prompt k times and score it. Raises SyncError if any token is of another version."""
    started = time.perf_counter()
    groups = await asyncio.gather(*(_sample(p, config, service, scorer) for p in prompts))
    scored = [[s.reward for s in group if s.reward is not None] for group in groups]
    counted = [rewards for rewards in scored if rewards]
    for group in groups:
        for s in group:
            others = {span[0] for span in s.sample.version_spans} - {version, OBSERVED}
            if others:
                raise SyncError(f"evaluation of version {version} met tokens of version {sorted(others)}")
    means = np.array([np.mean(rewards) for rewards in counted])
    k = config.eval.samples_per_prompt
    return Evaluation(
        version=version,
        avg_at_k=float(means.mean()) if len(means) else math.nan,
        standard_error=float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan,
        pass_at_k=float(np.mean([max(rewards) >= 1 for rewards in counted])) if counted else math.nan,
        k=k,
        num_prompts=len(groups),
        num_unscored=sum(len(group) for group in groups) - sum(map(len, scored)),
        num_tokens=sum(s.num_drawn for group in groups for s in group),
        seconds=time.perf_counter() - started,
    )


async def _sample(prompt: Prompt, config: Config, service: RolloutService, scorer: Scorer) -> list[ScoredSample]:
    section = config.eval
    params = SamplingParams(
        n=section.samples_per_prompt,
        temperature=section.temperature,
        top_p=section.top_p,
        max_tokens=section.max_response_tokens or config.rollout.max_response_tokens,
        stop=config.sampling.stop,
        seed=request_seed(section.seed, prompt),
    )
    scored: list[ScoredSample] = []
    await sample_prompt(
        prompt,
        request_id=f"eval/{prompt.prompt_id}",
        params=params,
        priority=PRIORITY,
        service=service,
        scorer=scorer,
        deliver=scored.extend,
    )
    return scored
