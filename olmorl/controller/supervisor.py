"""Keeps the inference workers going: notices the lost ones within seconds, replaces them, and ends the run when too few
are left.

Whoever sees a worker fail calls `lost`; the first report counts. The worker is killed, so that it cannot wake up and
answer, its unfinished samples are issued again elsewhere, the sync protocol goes on without it, and a replacement is
started, stale until it has committed the newest weights.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from olmorl.contract.errors import OlmoRLError, WorkerError
from olmorl.controller.cluster import Remote
from olmorl.controller.rollout import RolloutService
from olmorl.controller.sync import WeightSync

log = logging.getLogger(__name__)


class EngineSupervisor:
    def __init__(
        self,
        *,
        start_engine: Callable[[int], Awaitable[Remote]],
        heartbeat_seconds: float,
        max_restarts: int,
        min_workers: int,
    ) -> None:
        """`start_engine(slot)` starts a worker where an earlier one of that slot was."""
        self._start_engine = start_engine
        self._heartbeat = heartbeat_seconds
        self._max_restarts = max_restarts
        self._min_workers = min_workers
        self._alive: dict[str, tuple[int, Remote]] = {}
        self._replacing: set[asyncio.Task[None]] = set()
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._service: RolloutService | None = None
        self._sync: WeightSync | None = None
        self._last_loss = ""
        self.restarts = 0

    def attach(self, *, service: RolloutService, sync: WeightSync) -> None:
        self._service, self._sync = service, sync

    async def watch(self, slot: int, engine: Remote) -> None:
        """Take charge of a worker that stands; it serves once it holds the newest weights."""
        assert self._sync is not None, "attach() first"
        self._alive[engine.name] = (slot, engine)
        self._watching[engine.name] = asyncio.create_task(self._heartbeats(engine), name=f"heartbeat {engine.name}")
        await self._sync.add(engine)

    def lost(self, name: str, reason: str) -> None:
        """Safe to call at any time and more than once."""
        slot, engine = self._alive.pop(name, (None, None))
        if slot is None or engine is None:
            return
        assert self._service is not None and self._sync is not None, "attach() first"
        log.warning("%s is lost: %s", name, reason)
        self._watching.pop(name).cancel()
        engine.kill()
        self._service.remove_worker(name)
        self._sync.lost(name, reason)
        self._replace(slot, reason)

    async def run(self) -> None:
        """Waits until too few workers are left, and raises; unblocked by `lost`. Runs until cancelled."""
        try:
            await self._failed
        finally:
            tasks = [*self._watching.values(), *self._replacing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _replace(self, slot: int, reason: str) -> None:
        self._last_loss = reason
        if self.restarts < self._max_restarts:
            self.restarts += 1
            task = asyncio.create_task(self._start_replacement(slot))
            self._replacing.add(task)
            task.add_done_callback(partial(self._replaced, slot))
        self._check_floor()

    def _check_floor(self) -> None:
        if len(self._alive) + len(self._replacing) < self._min_workers and not self._failed.done():
            self._failed.set_exception(
                WorkerError(
                    f"{len(self._alive)} inference workers are left after {self.restarts} restarts, fewer than "
                    f"cluster.min_inference_workers = {self._min_workers}; the last was lost because: {self._last_loss}"
                )
            )

    async def _start_replacement(self, slot: int) -> None:
        engine = await self._start_engine(slot)
        try:
            await self.watch(slot, engine)
        except WorkerError as error:
            self.lost(engine.name, str(error))

    def _replaced(self, slot: int, task: "asyncio.Task[None]") -> None:
        self._replacing.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, OlmoRLError):
            log.warning("a replacement for inference worker %d did not start: %s", slot, error)
            self._replace(slot, str(error))
        elif error is None:
            self._check_floor()
        elif not self._failed.done():
            self._failed.set_exception(error)

    async def _heartbeats(self, engine: Remote) -> None:
        try:
            await _beat(engine, self._heartbeat)
        except WorkerError as error:
            asyncio.get_running_loop().call_soon(self.lost, engine.name, str(error))


async def watch_learners(learners: list[Remote], *, heartbeat_seconds: float) -> None:
    """Raises as soon as a learner rank is lost: the others would wait for it in a collective. Else runs for ever."""
    async with asyncio.TaskGroup() as tasks:
        for learner in learners:
            tasks.create_task(_beat(learner, heartbeat_seconds))


async def _beat(worker: Remote, heartbeat_seconds: float) -> None:
    while True:
        await worker.call("ping", timeout=heartbeat_seconds)
        await asyncio.sleep(heartbeat_seconds / 4)
