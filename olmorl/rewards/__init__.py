"""Rewards: verifiers by name or import path, each run in a process of its own that can be killed.

`score` judges one completion and blocks; a run awaits a `VerifierPool`. The names load lazily, so that a verifier
process, which imports this package too, starts with next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olmorl.rewards.blocking import score
    from olmorl.rewards.pool import VerifierPool
    from olmorl.rewards.verdict import Verdict, VerifierJob

__all__ = ["Verdict", "VerifierJob", "VerifierPool", "score"]

_HOMES = {"Verdict": "verdict", "VerifierJob": "verdict", "VerifierPool": "pool", "score": "blocking"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
