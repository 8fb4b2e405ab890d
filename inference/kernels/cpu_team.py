"""Threads that run one compiled function together, and what they need to agree inside it.

A step has hundreds of short pieces; starting threads for each, or letting a library's idle threads spin between them,
costs more than the pieces. So a team enters a compiled function once a step, shares the items of each piece by an
atomic counter (a thread that the machine holds up takes fewer) and meets at barriers. Results do not depend on who
computed what.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from inference.kernels.compiling import exact

_COUNTER_STEP = 8  # int64 between counters: each has a cache line of its own
_SPINS = 2000

_yield_core = types.ExternalFunction("sched_yield", types.int32())
Signals = np.ndarray
"""[1 + pieces, _COUNTER_STEP] int64: who arrived at barriers, then the items taken of each piece"""


def new_signals(num_pieces: int) -> Signals:
    return np.zeros((1 + num_pieces, _COUNTER_STEP), np.int64)


@intrinsic
def _add(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Atomic; what stood there before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", address, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def _read(typing_context, array, index):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_element(context, builder, signature, args), "acquire", 8)

    return types.int64(array, types.int64), generate


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [builder.mul(args[1], ir.Constant(ir.IntType(64), _COUNTER_STEP))])


@exact
def meet(signals, threads, met):  # type: ignore[no-untyped-def]
    """Wait until all have called this `met + 1` times; that number."""
    met += 1
    if threads > 1:
        _add(signals, 0, 1)
        spins = 0
        while _read(signals, 0) < threads * met:
            spins += 1
            if spins > _SPINS:
                _yield_core()
    return met


@exact
def take(signals, piece, size):  # type: ignore[no-untyped-def]
    """The first of the next `size` items of a piece."""
    return _add(signals, 1 + piece, size)


class Team:
    """`threads` - 1 threads that sleep between calls, beside the one that calls."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, threads
        self.threads = threads
        self._jobs: list[queue.SimpleQueue[Any]] = []
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for index in range(1, threads):
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._jobs.append(jobs)
            threading.Thread(target=_serve, args=(jobs, self._done), name=f"engine-{index}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._jobs)

    def run(self, function: Callable[..., Any], *args: Any, threads: int | None = None) -> None:
        """`function(thread, threads, *args)` on each thread; back when all are done."""
        threads = min(threads or self.threads, self.threads)
        for index in range(1, threads):
            self._jobs[index - 1].put((function, (index, threads, *args)))
        function(0, threads, *args)
        errors = [self._done.get() for _ in range(1, threads)]
        for error in errors:
            if error is not None:
                raise error


def _serve(jobs: "queue.SimpleQueue[Any]", done: "queue.SimpleQueue[BaseException | None]") -> None:
    while (job := jobs.get()) is not None:
        function, args = job
        try:
            function(*args)
            done.put(None)
        except Exception as error:  # handed to the thread that called
            done.put(error)
        del job, function, args  # or an idle thread would keep a step's arrays


def _dismiss(jobs: "list[queue.SimpleQueue[Any]]") -> None:
    for one in jobs:
        one.put(None)
