"""The start of a run on a cluster takes minutes: each stage says what it waits for, and for how long at most."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Stage(Protocol):
    def __call__(self, what: str, *, seconds: float) -> AbstractContextManager[None]: ...


@contextmanager
def stage(what: str, *, seconds: float, told: bool) -> Iterator[None]:
    """`seconds`: how long each wait inside may last. A failure tells for itself."""
    began = time.monotonic()
    if told:
        print(f"start: {what}, at most {seconds:g} s", file=sys.stderr, flush=True)
    yield
    if told:
        print(f"start: {what}: done in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
