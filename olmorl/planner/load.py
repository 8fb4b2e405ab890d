"""What a run is asked to do: prompts, response lengths, and which groups carry signal. Drawn once, from a seed."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import pyarrow.parquet as pq

from olmorl.contract.errors import ConfigError
from olmorl.metrics.rollout_log import rollout_files

SIGMA = 0.9  # of the logarithm; the spread that fits published length histograms of thinking models


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    lengths: Sequence[int]
    """response tokens to draw from"""
    prompt_tokens: int
    zero_variance: float = 0.0
    """share of groups whose samples are all right or all wrong"""
    verifier_seconds: float = 0.0

    def group(self, number: int, samples: int, *, seed: int) -> tuple[list[int], bool]:
        """(response lengths, whether it carries signal) of the group of that number, whoever asks and when."""
        rng = random.Random(f"{seed}/{number}")
        return [rng.choice(self.lengths) for _ in range(samples)], rng.random() >= self.zero_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """Groups as they were, over and over."""

    groups: Sequence[tuple[list[int], bool]]
    prompt_tokens: int
    verifier_seconds: float = 0.0

    def group(self, number: int, samples: int, *, seed: int) -> tuple[list[int], bool]:
        """As `Load.group`; a group that lost samples is filled up with its own lengths."""
        lengths, has_signal = self.groups[number % len(self.groups)]
        return [lengths[i % len(lengths)] for i in range(samples)], has_signal


Groups = Load | RecordedLoad


def lognormal_lengths(mean: float, longest: int, *, sigma: float = SIGMA, count: int = 4096) -> list[int]:
    """Quantiles of a log-normal, clipped at `longest`, whose mean after clipping is `mean`."""
    if not 1 <= mean <= longest:
        raise ConfigError(f"a mean of {mean:g} tokens is not between 1 and the longest, {longest}")
    normal = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]

    def drawn(mu: float) -> list[int]:
        return [min(longest, max(1, round(math.exp(min(mu + sigma * z, 30.0))))) for z in normal]

    low, high = -5.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(drawn(middle)) / count < mean else (low, middle)
    return drawn(high)


def read_lengths(path: Path) -> list[int]:
    """From a run directory's rollouts, or from a JSON list of numbers."""
    if path.is_dir():
        tables = [pq.read_table(file, columns=["token_ids"]) for file in rollout_files(path)]
        offsets = [table["token_ids"].combine_chunks().offsets for table in tables]
        return [int(b - a) for o in offsets for a, b in zip(o.to_pylist(), o.to_pylist()[1:], strict=False)]
    try:
        lengths = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no JSON list of lengths: {error}") from None
    if not isinstance(lengths, list) or not lengths or not all(type(n) is int and n > 0 for n in lengths):
        raise ConfigError(f"{path} is no JSON list of lengths: it must hold whole numbers above 0")
    return lengths
