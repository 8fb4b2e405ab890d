"""Keeps the inference workers going: notices the lost ones within seconds, replaces them, takes in more as nodes join,
and ends the run when too few are left.

Whoever sees a worker fail calls `lost`; the first report counts. The worker is killed, so that it cannot wake up and
answer, its unfinished samples are issued again elsewhere, and the sync protocol goes on without it. Its place is vacant
then, like those up to inference.max_workers that were never filled: for each vacancy a worker waits until the cluster
has room, starts, and is stale until it has committed the newest weights.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from olmorl.contract.errors import OlmoRLError, WorkerError
from olmorl.controller.cluster import Remote
from olmorl.controller.rollout import RolloutService
from olmorl.controller.sync import WeightSync

log = logging.getLogger(__name__)

Unfit = tuple[Remote, str]
"""a worker that did not start, and why"""


class EngineSupervisor:
    def __init__(
        self,
        *,
        spawn_engine: Callable[[], Remote],
        start_engine: Callable[[Remote], Awaitable[None]],
        has_node: Callable[[str], bool],
        heartbeat_seconds: float,
        max_restarts: int,
        min_workers: int,
        patience_seconds: float,
    ) -> None:
        """`spawn_engine()` asks the cluster for a place, `start_engine` makes an engine of the process placed there.

        `has_node(id)`: whether the cluster still has that node. With fewer than `min_workers` for `patience_seconds`
        the run ends.
        """
        self._spawn_engine = spawn_engine
        self._start_engine = start_engine
        self._has_node = has_node
        self._heartbeat = heartbeat_seconds
        self._max_restarts = max_restarts
        self._min_workers = min_workers
        self._patience = patience_seconds
        self._alive: dict[str, Remote] = {}
        self._vacancies: set[asyncio.Task[Unfit | None]] = set()
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._too_few: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._service: RolloutService | None = None
        self._sync: WeightSync | None = None
        self._last_loss = ""
        self._broke_on: list[str] = []  # nodes that stand, one for each worker that was lost and replaced
        self.restarts = 0
        """workers that were lost and are replaced, or will be as soon as there is room"""

    def attach(self, *, service: RolloutService, sync: WeightSync) -> None:
        self._service, self._sync = service, sync

    async def watch(self, engine: Remote) -> None:
        """Take charge of a worker that stands; it serves once it holds the newest weights."""
        assert self._sync is not None, "attach() first"
        self._alive[engine.name] = engine
        self._watching[engine.name] = asyncio.create_task(self._heartbeats(engine), name=f"heartbeat {engine.name}")
        if self._too_few is not None and len(self._alive) >= self._min_workers:
            self._too_few.cancel()
            self._too_few = None
        await self._sync.add(engine)

    def invite(self, count: int) -> None:
        """So many more workers join as soon as the cluster has room for them."""
        for _ in range(count):
            self._open_vacancy()

    def lost(self, name: str, reason: str) -> None:
        """Safe to call at any time and more than once."""
        engine = self._alive.pop(name, None)
        if engine is None:
            return
        assert self._service is not None and self._sync is not None, "attach() first"
        log.warning("%s is lost: %s", name, reason)
        self._watching.pop(name).cancel()
        engine.kill()
        self._service.remove_worker(name)
        self._sync.lost(name, reason)
        self._vacate(engine, reason)

    async def run(self) -> None:
        """Waits until too few workers are left, and raises; unblocked by `lost`. Runs until cancelled."""
        try:
            await self._failed
        finally:
            if self._too_few is not None:
                self._too_few.cancel()
            tasks = [*self._watching.values(), *self._vacancies]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _vacate(self, engine: Remote, reason: str) -> None:
        """`engine` is gone. Its place is filled again, unless it is one too many that broke on a node that stands."""
        self._last_loss = reason
        self._broke_on = [node for node in self._broke_on if self._stands(node)]
        if len(self._broke_on) < self._max_restarts or not self._stands(engine.node):
            self.restarts += 1
            self._broke_on.append(engine.node)
            self._open_vacancy()
        self._check_floor()

    def _check_floor(self) -> None:
        if len(self._alive) >= self._min_workers:
            return
        if len(self._alive) + len(self._vacancies) < self._min_workers:
            self._give_up("no restart is left")
        elif self._too_few is None:
            waited = f"the cluster had no room for another within {self._patience:g} s"
            self._too_few = asyncio.get_running_loop().call_later(self._patience, self._give_up, waited)

    def _give_up(self, reason: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(
                WorkerError(
                    f"{len(self._alive)} inference workers are left after {self.restarts} restarts, fewer than "
                    f"cluster.min_inference_workers = {self._min_workers}; {reason}; "
                    f"the last was lost because: {self._last_loss}"
                )
            )

    def _open_vacancy(self) -> None:
        task = asyncio.create_task(self._fill())
        self._vacancies.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, vacancy: "asyncio.Task[Unfit | None]") -> None:
        self._vacancies.discard(vacancy)
        if vacancy.cancelled():
            return
        if (bug := vacancy.exception()) is not None:
            if not self._failed.done():
                self._failed.set_exception(bug)
        elif (unfit := vacancy.result()) is not None:
            self._vacate(*unfit)
        else:
            self._check_floor()  # it may have been lost while it was still counted as one to come

    def _stands(self, node: str) -> bool:
        """Whoever was lost with its node is not held against the cap: a successor cannot fail for the same reason.

        Asked anew each time, for Ray may notice a dead node later than we its workers.
        """
        return not node or self._has_node(node)

    async def _fill(self) -> Unfit | None:
        """Waits for room in the cluster, as long as it takes; then starts a worker there."""
        engine = self._spawn_engine()
        try:
            await engine.placed()
            await self._start_engine(engine)
        except OlmoRLError as error:
            log.warning("%s did not start: %s", engine.name, error)
            engine.kill()
            return engine, str(error)
        log.info("%s joins", engine.name)
        try:
            await self.watch(engine)
        except OlmoRLError as error:
            self.lost(engine.name, str(error))
        return None

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
