"""What an environment is. Standard library alone: a user's own module needs no more than this file."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

MAX_TURNS = 8


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to one turn of the model."""

    observation: str | None
    """put behind the turn as it stands, chat markers included, and read by the model; None ends the episode"""
    reward: float = 0.0
    """added to the rewards of the other turns and of the row's verifiers"""


class Environment(Protocol):
    """A class of one's own; an instance is made for an episode, as `C(prompt=..., ground_truth=..., seed=...)`.

    The episode must follow from these three and the turns alone (draw from `random.Random(seed)`, which all samples
    of a group share). For only then can it be played again: each turn is asked of whichever process is free, which
    plays the turns before it anew, and so nothing is lost with a process that is killed. `step` should be cheap.
    """

    stop: ClassVar[tuple[str, ...]] = ()
    """strings that end a turn, besides the end of the model's text; they stay in what the model reads"""
    max_turns: ClassVar[int] = MAX_TURNS

    def __init__(self, *, prompt: str, ground_truth: object, seed: int) -> None: ...

    def step(self, completion: str) -> Reply:
        """`completion` is what the model wrote in this turn, a stop string at its end included."""
        ...
