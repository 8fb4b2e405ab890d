"""How many prompts of each source an epoch holds, and which: a pure function, so that a cursor needs no history.

A source is an endless stream of its own epochs, each holding every row once. An epoch of the mixture takes the next
`per_epoch` rows of each stream, so that over the epochs all rows of a source take their turn equally often.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from olmorl.config.data_sections import SourceSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A source's part of the mixture."""

    name: str
    size: int
    """prompts it has"""
    per_epoch: int
    num_too_long: int = 0
    """rows left out because they exceed the prompt limit"""


def shares_per_epoch(sources: Sequence[SourceSection], sizes: Sequence[int]) -> list[int]:
    """By counts where given, all prompts where not; by weights: as many prompts as there are in all, shared out by
    weight, at least one each."""
    if sources[0].weight is None:
        return [source.count or size for source, size in zip(sources, sizes, strict=True)]
    weights = [source.weight or 0.0 for source in sources]
    wanted = [sum(sizes) * weight / sum(weights) for weight in weights]
    counts = [int(number) for number in wanted]
    by_remainder = sorted(range(len(sources)), key=lambda i: counts[i] - wanted[i])
    for i in by_remainder[: sum(sizes) - sum(counts)]:
        counts[i] += 1
    return [max(count, 1) for count in counts]
