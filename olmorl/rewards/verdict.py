"""What is asked of a verifier, and what it says. A failure to judge is a status of its own, never a reward of 0."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Status = Literal["scored", "timeout", "error", "unscorable"]


class Episode(NamedTuple):
    """What an environment is asked: to go on after these turns of the model."""

    turns: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierJob:
    verifier: str
    """name or my_module:my_function"""
    completion: str
    ground_truth: object
    prompt: str | None = None
    num_tokens: int | None = None
    """of the completion; for verifiers that have a parameter of this name"""
    episode: Episode | None = None
    """set for environments alone, which look at it in place of the completion"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    status: Status
    reward: float | None = None
    """None unless scored; a completion without an answer is scored 0"""
    detail: str = ""
    observation: str | None = None
    """of an environment: what the model reads next; None ends the episode"""
    traceback: str = field(default="", repr=False, compare=False)
    """of what a verifier raised; for the log"""

    def __post_init__(self) -> None:
        assert (self.reward is not None) == (self.status == "scored"), f"{self.status} with reward {self.reward}"


def scored(reward: float, detail: str = "") -> Verdict:
    return Verdict(status="scored", reward=reward, detail=detail)


def unscorable(detail: str) -> Verdict:
    """The ground truth is at fault: no completion could be judged against it."""
    return Verdict(status="unscorable", detail=detail)
