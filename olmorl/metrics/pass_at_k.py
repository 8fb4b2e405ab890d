"""avg@k and pass@k over a set of prompts, each with its standard error.

pass@k of a prompt is the unbiased estimate from n >= k samples of which c pass, 1 - C(n - c, k) / C(n, k) (Chen et al.
2021, eq. 1). Samples of one prompt are not independent draws from the task, so errors are those of the mean over
prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """NaN where it cannot be known: the mean of no prompt, the error from one."""

    mean: float
    standard_error: float


def avg_at_k(rewards: Sequence[Sequence[float]]) -> Estimate:
    """The mean reward, of the scored samples of each prompt; a prompt without one is left out."""
    return _over_prompts([float(np.mean(samples)) for samples in rewards if samples])


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> Estimate:
    """The chance that one of k samples passes, which a reward of 1 or more is. Prompts with fewer than k scored
    samples are left out."""
    return _over_prompts([_pass_at_k(samples, k) for samples in rewards if len(samples) >= k])


def _pass_at_k(rewards: Sequence[float], k: int) -> float:
    num_samples, num_failed = len(rewards), sum(reward < 1 for reward in rewards)
    return 1.0 - math.comb(num_failed, k) / math.comb(num_samples, k)


def _over_prompts(values: Sequence[float]) -> Estimate:
    if not values:
        return Estimate(math.nan, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(float(np.mean(values)), error)
