"""A group: one occurrence of a prompt, its samples, and what became of it."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from olmorl.contract.generation import RolloutSample
from olmorl.data.prompt import Prompt
from olmorl.rewards.verdict import Status


class Fate(StrEnum):
    """How a sample ended; the bins of the waste ledger."""

    TRAINED = "trained"
    ZERO_VARIANCE = "zero_variance"
    SURPLUS = "surplus"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    ERROR = "error"
    EVAL = "eval"


class State(StrEnum):
    WAITING = "waiting"  # holds a slot; no worker has it yet
    RUNNING = "running"  # samples are being generated or scored
    FINISHED = "finished"  # every sample is scored; may be trained
    TAKEN = "taken"  # part of a batch on its way to the learner
    TRAINED = "trained"  # trained; its slot frees once the weights it made are live


@dataclass(slots=True, kw_only=True)
class ScoredSample:
    """A finished sample with its verdict. `reward` is None unless the verdict is "scored"; unscaled."""

    sample: RolloutSample
    reward: float | None
    verdict: Status | None
    """None where nothing judges"""
    detail: str = ""
    advantage: float = 0.0
    fate: Fate | None = None
    drawn: np.ndarray | None = None
    """[T] bool, False on tokens that an environment wrote; None: the policy drew all"""
    learner_logprobs: np.ndarray | None = None
    """[T] float32, under the policy before the step that trained it, NaN where a token is not trained; None: no step
    has"""

    @property
    def num_drawn(self) -> int:
        """Tokens that the policy drew: those that cost and count."""
        return len(self.sample.token_ids) if self.drawn is None else int(self.drawn.sum())

    @property
    def loss_mask(self) -> np.ndarray:
        """[T] bool"""
        return np.ones(len(self.sample.token_ids), np.bool_) if self.drawn is None else self.drawn


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    prompt: Prompt
    order: int
    """place in the order of admission"""
    admitted_version: int
    """policy version that was live when the slot was given; no token of the group is older"""
    seed: int
    t_admitted: float
    state: State = State.WAITING
    samples: list[ScoredSample] = field(default_factory=list)
    tokens_received: int = 0
    """also of samples not scored yet"""
    trained_version: int | None = None
    has_signal: bool = False
    """of a finished group"""
    overtaken: bool = False
    """a batch with younger groups left it behind, still under way"""

    @property
    def passed(self) -> list[bool]:
        """Of each sample that is scored: has it the full reward?"""
        return [self.prompt.is_passed_by(s.reward) for s in self.samples if s.reward is not None]

    @property
    def pass_rate(self) -> float | None:
        """Share of the scored samples that have the full reward; None if none is scored."""
        passed = self.passed
        return sum(passed) / len(passed) if passed else None
