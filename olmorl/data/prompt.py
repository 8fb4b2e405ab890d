"""What the run knows of a prompt: once for the data set, once for every time it is served."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ROUNDING = 1e-6  # of rewards: 0.6 + 0.3 + 0.1 is less than 1


def passes(reward: float, full_reward: float) -> bool:
    return reward >= full_reward - ROUNDING


class Check(NamedTuple):
    """What one verifier is to judge a completion by."""

    verifier: str | None
    """None: the row names none"""
    ground_truth: object


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedExample:
    """One row, rendered and tokenised. P tokens."""

    index: int
    """row number over all sources, also counting rows that were too long"""
    token_ids: np.ndarray  # [P] int32
    text: str
    """what the model reads, special tokens included"""
    checks: tuple[Check, ...]
    data_source: str
    place: str = ""
    """where the row stands: file:line, or source:row"""
    environment: str | None = None
    """what the model talks to before it is judged"""
    lengths: tuple[int, ...] | None = None
    """tokens that each response is given, whatever the model says; None, but for loads that are measured"""
    full_reward: float = 1.0
    """of a response that satisfies every verifier; it passes"""

    def is_passed_by(self, reward: float) -> bool:
        return passes(reward, self.full_reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(EncodedExample):
    """One occurrence of a row in the stream; (epoch, position) alone finds it again."""

    epoch: int
    position: int
    """place in the epoch's order"""
    repeat: int = 0
    """how often the epoch may have served the row before; only a source with a weight or count repeats"""

    @property
    def prompt_id(self) -> str:
        return f"{self.epoch}_{self.index}" + (f"_{self.repeat}" if self.repeat else "")
