"""Ends a computation that takes too much CPU time, without losing the process.

An alarm needs the main thread, which is where a verifier process runs its verifiers; elsewhere the deadline of the
pool must do. It counts CPU time, so that a busy machine makes no difference, and raises a BaseException, which the
`except Exception` of a library does not swallow. What never returns to Python is the pool's to kill.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Overrun(BaseException):
    """The computation took too long."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises Overrun out of the body."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, _raise)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous)


def _raise(signum: int, frame: FrameType | None) -> None:
    raise Overrun
