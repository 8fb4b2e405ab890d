"""Where the time of a worker went: every second under one name, so that the names add up to wall time.

A learner is told what it does by the driver, which waits for it meanwhile (`TimeLedger`). An engine counts itself
(`engine_seconds`): what is neither busy nor held up by an update is waiting for work.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

from olmorl.metrics.utilization import since

LearnerTime = Literal["starting", "waiting", "training", "sending", "checkpointing"]
LEARNER_TIMES: tuple[LearnerTime, ...] = get_args(LearnerTime)
EngineTime = Literal["starting", "prefill", "decode", "recompute", "stalled", "waiting"]
ENGINE_TIMES: tuple[EngineTime, ...] = get_args(EngineTime)


class TimeLedger:
    """Example:
    ledger = TimeLedger()  # is starting
    ledger.enter("waiting")  # whatever it did before ends here
    with ledger.during("training"):
        ...
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._doing: LearnerTime = "starting"
        self._since = clock()
        self._totals: dict[LearnerTime, float] = dict.fromkeys(LEARNER_TIMES, 0.0)

    def enter(self, doing: LearnerTime) -> None:
        now = self._clock()
        self._totals[self._doing] += now - self._since
        self._doing, self._since = doing, now

    @contextmanager
    def during(self, doing: LearnerTime) -> Iterator[None]:
        """Afterwards it does again what it did before."""
        before = self._doing
        self.enter(doing)
        try:
            yield
        finally:
            self.enter(before)

    def totals(self) -> dict[str, float]:
        """Seconds under each name, what is going on now included; their sum is the time since construction."""
        self.enter(self._doing)
        return {str(kind): seconds for kind, seconds in self._totals.items()}


def engine_seconds(before: Mapping[str, float], after: Mapping[str, float], *, span: float) -> dict[str, float]:
    """How an engine spent the time between two snapshots of its counters, by its own clock.

    Until the first snapshot it was `starting` for what `span`, the time that the caller saw pass, has more than its
    clock, which starts when it is built. Later a span that differs only says that a snapshot came late.
    """
    lived = since(before, after, "wall_seconds")
    recompute = since(before, after, "recompute_seconds")
    prefill = since(before, after, "prefill_seconds")
    # A step that prefills may recompute too; then the recomputed share comes out of the decoding time at the most.
    decode = since(before, after, "busy_seconds") - prefill - recompute
    spent = {
        "starting": 0.0 if "wall_seconds" in before else max(span - lived, 0.0),
        "prefill": prefill + min(decode, 0.0),
        "decode": max(decode, 0.0),
        "recompute": recompute,
        "stalled": since(before, after, "stall_seconds"),
    }
    spent["waiting"] = max(spent["starting"] + lived - sum(spent.values()), 0.0)
    return spent
