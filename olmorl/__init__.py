"""OlmoRL: reinforcement learning for language models, built around generating rollouts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olmorl.controller.run import Run

__version__ = "0.1.0"
__all__ = ["Run"]


def __getattr__(name: str) -> object:
    if name == "Run":
        from olmorl.controller.run import Run  # brings Ray, which most of the package does without

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
