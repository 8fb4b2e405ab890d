"""Lost workers are replaced, so many times and no more; with too few left the run is told, and never waits for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import pytest

from olmorl.config.schema import Config
from olmorl.contract.errors import WorkerError, WorkerLostError
from olmorl.controller.rollout import RolloutService
from olmorl.controller.supervisor import EngineSupervisor
from olmorl.controller.sync import WeightSync

HEARTBEAT_SECONDS = 0.5
PATIENCE_SECONDS = 1000.0  # where restarts are used up nobody waits so long


class Process:
    """An engine of this process, behind what a supervisor knows of a worker. There is always room for it."""

    node = "here"

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine: Any = None

    async def placed(self) -> None:
        pass

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        return await self.engine.call(method, *args, timeout=timeout)

    def kill(self) -> None:
        if self.engine is not None:
            self.engine.kill()


class Fleet:
    """A supervisor of real engines, with the service and the sync that it keeps informed."""

    def __init__(self, config: Config, start: Callable[[str], Any], *, max_restarts: int, min_workers: int = 1) -> None:
        self._numbers = count()
        self._start = start
        self.started: list[str] = []
        self.supervisor = EngineSupervisor(
            spawn_engine=self.spawn_engine,
            start_engine=self.start_engine,
            has_node=lambda node: node == Process.node,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            max_restarts=max_restarts,
            min_workers=min_workers,
            patience_seconds=PATIENCE_SECONDS,
        )
        self.service = RolloutService(on_lost=self.supervisor.lost)
        self.sync = WeightSync(
            learners=[],
            service=self.service,
            section=config.sync,
            transport="gloo",
            canary=None,
            on_lost=self.supervisor.lost,
        )
        self.supervisor.attach(service=self.service, sync=self.sync)

    def spawn_engine(self) -> Any:
        return Process(f"inference-{next(self._numbers)}")

    async def start_engine(self, process: Any) -> None:
        process.engine = await asyncio.to_thread(self._start, process.name)
        self.started.append(process.name)

    async def add(self) -> Any:
        process = self.spawn_engine()
        await self.start_engine(process)
        await self.supervisor.watch(process)
        return process.engine


@pytest.fixture
def supervise(quickstart_config: Callable[..., Config], start_engine: Callable[[str], Any]) -> Callable[..., None]:
    def run(
        scenario: Callable[[Fleet], Awaitable[None]],
        *,
        start: Callable[[str], Any] = start_engine,
        **limits: int,
    ) -> None:
        async def main() -> None:
            fleet = Fleet(quickstart_config(), start, **limits)
            async with asyncio.timeout(60):
                await scenario(fleet)

        asyncio.run(main())

    return run


def test_a_worker_is_replaced_once_however_often_it_is_reported(supervise: Callable[..., None]) -> None:
    async def scenario(fleet: Fleet) -> None:
        watching = asyncio.create_task(fleet.supervisor.run())
        await fleet.add()
        for reason in ("it hangs", "it died", "nobody knows it"):
            fleet.supervisor.lost("inference-0", reason)
        while fleet.started != ["inference-0", "inference-1"]:
            await asyncio.sleep(0.01)
        assert fleet.supervisor.restarts == 1 and not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    supervise(scenario, max_restarts=8)


def test_a_worker_that_fails_is_noticed_by_its_heartbeat(supervise: Callable[..., None]) -> None:
    async def scenario(fleet: Fleet) -> None:
        engine = await fleet.add()
        engine.worker.shutdown()
        with pytest.raises(WorkerError, match=r"0 inference workers are left after 0 restarts.*shut down"):
            await fleet.supervisor.run()

    supervise(scenario, max_restarts=0)


def test_restarts_are_capped(supervise: Callable[..., None]) -> None:
    """The k-th worker dies as the one before did: the run ends, and says of what."""

    async def scenario(fleet: Fleet) -> None:
        watching = asyncio.create_task(fleet.supervisor.run())
        await fleet.add()
        for number in range(3):
            while len(fleet.started) == number:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)  # it is watched as soon as it stands
            fleet.supervisor.lost(f"inference-{number}", f"death {number}")
        with pytest.raises(WorkerError, match=r"0 inference workers are left after 2 restarts.*because: death 2"):
            await watching
        assert fleet.started == ["inference-0", "inference-1", "inference-2"]

    supervise(scenario, max_restarts=2)


def test_replacements_that_do_not_start_count_as_restarts(supervise: Callable[..., None]) -> None:
    def refuse(name: str) -> Any:
        raise WorkerLostError(f"{name} died on its way up")

    async def scenario(fleet: Fleet) -> None:
        fleet.supervisor.invite(1)
        with pytest.raises(WorkerError, match=r"after 3 restarts.*inference-3 died on its way up"):
            await fleet.supervisor.run()

    supervise(scenario, start=refuse, max_restarts=3)


def test_below_the_floor_the_run_ends_although_some_are_left(supervise: Callable[..., None]) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.add()
        await fleet.add()
        fleet.supervisor.lost("inference-0", "a node went away")
        with pytest.raises(WorkerError, match=r"1 inference workers are left.*min_inference_workers = 2; .*went away"):
            await fleet.supervisor.run()

    supervise(scenario, max_restarts=0, min_workers=2)


def test_a_replacement_is_stale_until_it_committed(supervise: Callable[..., None]) -> None:
    """It gets no request before: the service does not know it."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.add()
        fleet.supervisor.lost("inference-0", "killed")
        while len(fleet.started) < 2:
            await asyncio.sleep(0.01)
        assert fleet.sync.serving == [] and fleet.service.stats == {}

    supervise(scenario, max_restarts=1)


def test_a_newcomer_that_is_lost_while_it_is_taken_in_is_not_waited_for(
    supervise: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vacancy is still open then, and would count as one to come."""

    async def scenario(fleet: Fleet) -> None:
        async def add(engine: Any) -> None:
            raise WorkerLostError(f"{engine.name} died as it was taken in")

        monkeypatch.setattr(fleet.sync, "add", add)
        fleet.supervisor.invite(1)
        with pytest.raises(WorkerError, match=r"after 0 restarts.*no restart is left.*inference-0 died as it was"):
            await fleet.supervisor.run()

    supervise(scenario, max_restarts=0)
