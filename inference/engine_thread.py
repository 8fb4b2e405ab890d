"""The thread that owns an engine: steps while there is work, sleeps while there is none, obeys between two steps.

Consumes: commands, each a callable with a future. Produces: finished samples, handed to `on_finished`.
Waits for: a command, or work while not paused. Unblocked by: `call`, `resume`, `close`.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from inference.engine import Engine
from inference.request import Sequence
from olmorl.contract.errors import WorkerError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class EngineThread:
    def __init__(self, engine: Engine, *, on_finished: Callable[[list[Sequence]], None]) -> None:
        self.engine = engine
        self.failure: WorkerError | None = None
        self._on_finished = on_finished
        self._changed = threading.Condition()
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._pauses: set[str] = set()  # who wants the engine to stand still
        self._idle = True
        self._closing = False
        self._stalled: tuple[float, float | None] = (0.0, None)  # seconds, and since when it stands still again
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], Result]) -> Result:
        """Run `command` on the engine's thread between two steps; its result or exception."""
        future: Future[Result] = Future()
        with self._changed:
            self._check()
            self._commands.append((command, future))
            self._changed.notify_all()
        return future.result()

    def pause(self, who: str = "caller") -> None:
        """No step is made from when this returns until this `who` resumes; requests are kept, commands still run."""
        self.call(lambda: self.begin_pause(who))

    def resume(self, who: str = "caller") -> None:
        self.call(lambda: self.end_pause(who))

    def begin_pause(self, who: str) -> None:
        """`pause` from a command, on the engine's thread."""
        self._pauses.add(who)
        seconds, since = self._stalled
        self._stalled = (seconds, time.perf_counter() if since is None else since)

    def end_pause(self, who: str) -> None:
        """`resume` from a command, on the engine's thread. Nothing if `who` did not pause."""
        self._pauses.discard(who)
        if not self._pauses:
            self._stalled = (self.stalled_seconds(), None)

    def wait_idle(self, timeout_seconds: float) -> bool:
        """True once no request is unfinished, False after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self.failure is not None, timeout_seconds)
            self._check()
            return self._idle

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def stalled_seconds(self) -> float:
        """How long the engine stood still for others so far. From any thread; never falls."""
        seconds, since = self._stalled
        return seconds + (0.0 if since is None else time.perf_counter() - since)

    def add_stall(self, seconds: float) -> None:
        """Count time a command took, unless a pause counts it already. On the engine's thread."""
        before, since = self._stalled
        if since is None:
            self._stalled = (before + seconds, None)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._closing:
            raise WorkerError("this engine was shut down")

    def _run(self) -> None:
        failure = WorkerError("this engine was shut down")
        try:
            self._loop()
        except Exception as error:
            logger.exception("the engine stopped")
            failure = WorkerError(f"the engine stopped: {type(error).__name__}: {error}")
        with self._changed:
            self.failure = failure
            for _, future in self._commands:
                future.set_exception(failure)
            self._commands.clear()
            self._changed.notify_all()
        self._on_finished([])  # wakes whoever waits for samples

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._idle = not self.engine.has_unfinished
                if self._idle:
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or self._commands or not (self._pauses or self._idle))
                if self._closing:
                    return
                commands, self._commands = self._commands, []
                if commands:
                    self._idle = False  # until they have run: one of them may bring requests
            for command, future in commands:
                try:
                    future.set_result(command())
                except Exception as error:  # the caller's; the engine goes on
                    future.set_exception(error)
            if not self._pauses:
                finished = self.engine.step()
                if finished:
                    self._on_finished(finished)
