"""Who is replaced, who joins, and when a run ends for want of workers. The cluster is a stand-in with as much room as a
test gives it; the supervisor, the service and the sync are real, but for the learners, who have nothing to send yet."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from olmorl.config.schema import SyncSection
from olmorl.contract.errors import WorkerError, WorkerLostError
from olmorl.controller.rollout import RolloutService
from olmorl.controller.supervisor import EngineSupervisor
from olmorl.controller.sync import WeightSync


class Process:
    """Where `Remote` meets the cluster: placed when there is room, answers until its node goes."""

    def __init__(self, name: str, cluster: "Room") -> None:
        self.name, self.node, self._cluster = name, "", cluster
        self.killed = False

    async def placed(self) -> None:
        self.node = await self._cluster.free.get()

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        await asyncio.sleep(0)
        if self.killed or self.node not in self._cluster.nodes:
            raise WorkerLostError(f"{self.name} died during {method}()")
        if method == "ping":
            await asyncio.sleep(0.001)

    def kill(self) -> None:
        self.killed = True


class Room:
    """A cluster of nodes with room for some processes each."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self.free: asyncio.Queue[str] = asyncio.Queue()
        self.processes: list[Process] = []
        self.unfit: set[str] = set()

    def add(self, node: str, room: int) -> None:
        self.nodes.add(node)
        for _ in range(room):
            self.free.put_nowait(node)

    def spawn(self) -> Any:
        self.processes.append(Process(f"inference-{len(self.processes)}", self))
        return self.processes[-1]

    async def start(self, process: Any) -> None:
        if process.node in self.unfit:
            raise WorkerError(f"no model on {process.node}")

    def supervisor(self, **options: Any) -> EngineSupervisor:
        defaults = {"heartbeat_seconds": 5.0, "max_restarts": 2, "min_workers": 1, "patience_seconds": 30.0}
        supervisor = EngineSupervisor(
            spawn_engine=self.spawn,
            start_engine=self.start,
            has_node=self.nodes.__contains__,
            **{**defaults, **options},
        )
        service = RolloutService(on_lost=supervisor.lost)
        sync = WeightSync(
            learners=[],
            service=service,
            section=SyncSection(),
            transport="gloo",
            canary=None,
            on_lost=supervisor.lost,
        )
        supervisor.attach(service=service, sync=sync)
        return supervisor


async def started(room: Room, supervisor: EngineSupervisor, count: int) -> None:
    for _ in range(count):
        process = room.spawn()
        await process.placed()
        await supervisor.watch(process)


async def eventually(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.001)


def alive(room: Room) -> list[str]:
    return [p.name for p in room.processes if p.node in room.nodes and not p.killed]


def run(scenario: Callable[[Room], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await scenario(Room())
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run(whole())


def test_nodes_that_join_are_used_and_those_that_go_are_replaced_without_end() -> None:
    async def scenario(room: Room) -> None:
        room.add("a", 1)
        supervisor = room.supervisor(max_restarts=0)
        await started(room, supervisor, 1)
        supervisor.invite(2)
        assert alive(room) == ["inference-0"], "the others wait for room"
        room.add("b", 1)
        room.add("c", 1)
        await eventually(lambda: len(alive(room)) == 3)
        for _ in range(3):
            room.nodes.remove("b")
            await eventually(lambda: sum(p.node == "" for p in room.processes) == 1)
            room.add("b", 1)
            await eventually(lambda: len(alive(room)) == 3)
        assert supervisor.restarts == 3

    run(scenario)


def test_nodes_of_long_ago_are_asked_for_no_more() -> None:
    """The cluster is asked about each by itself: after a thousand preemptions that would take seconds."""

    async def scenario(room: Room) -> None:
        room.add("a", 1)
        supervisor = room.supervisor(max_restarts=0)
        await started(room, supervisor, 1)
        supervisor.invite(1)
        asked: list[str] = []
        supervisor._has_node = lambda node: asked.append(node) or node in room.nodes  # type: ignore[func-returns-value]
        for number in range(8):
            room.add(f"spot-{number}", 1)
            await eventually(lambda: len(alive(room)) == 2)
            room.nodes.remove(f"spot-{number}")
            await eventually(lambda: room.processes[-1].node == "")
        assert len(asked) < 30, "72 if those that are gone were asked for too"

    run(scenario)


def test_a_worker_that_breaks_on_a_node_that_stands_is_a_restart() -> None:
    async def scenario(room: Room) -> None:
        room.add("a", 4)
        supervisor = room.supervisor(max_restarts=2)
        await started(room, supervisor, 1)
        ended = asyncio.create_task(supervisor.run())
        for lost in range(2):
            supervisor.lost(f"inference-{lost}", "it broke")
            supervisor.lost(f"inference-{lost}", "and once more")
            await eventually(lambda: len(alive(room)) == 1)
        assert supervisor.restarts == 2
        supervisor.lost("inference-2", "the third time")
        with pytest.raises(WorkerError, match=r"0 .* are left after 2 restarts, .*no restart is left.*the third time"):
            await ended

    run(scenario)


def test_a_node_that_is_found_dead_later_gives_its_restart_back() -> None:
    """Ray notices a node whose link was cut later than the heartbeats of its worker do."""

    async def scenario(room: Room) -> None:
        room.add("a", 1)
        supervisor = room.supervisor(max_restarts=1)
        await started(room, supervisor, 1)
        supervisor.lost("inference-0", "silent")
        room.add("b", 2)
        await eventually(lambda: alive(room) == ["inference-1"])
        room.nodes.remove("a")
        supervisor.lost("inference-1", "it broke")
        await eventually(lambda: alive(room) == ["inference-2"])
        supervisor.lost("inference-2", "and so did this one")
        assert (supervisor.restarts, len(room.processes)) == (2, 3)

    run(scenario)


def test_a_node_where_no_worker_starts_uses_up_the_restarts() -> None:
    async def scenario(room: Room) -> None:
        room.add("a", 1)
        supervisor = room.supervisor(max_restarts=2)
        await started(room, supervisor, 1)
        supervisor.invite(1)
        room.unfit.add("b")
        room.add("b", 9)
        await eventually(lambda: supervisor.restarts == 2 and all(p.killed for p in room.processes[1:]))
        await asyncio.sleep(0.05)
        assert len(room.processes) == 4 and alive(room) == ["inference-0"]

    run(scenario)


def test_too_few_for_too_long_ends_the_run() -> None:
    async def scenario(room: Room) -> None:
        room.add("a", 1)
        supervisor = room.supervisor(patience_seconds=0.05)
        await started(room, supervisor, 1)
        room.nodes.remove("a")
        with pytest.raises(WorkerError, match=r"0 inference workers are left .*no room for another within 0.05 s"):
            async with asyncio.timeout(20):
                await supervisor.run()

    run(scenario)


def test_enough_in_time_is_enough() -> None:
    async def scenario(room: Room) -> None:
        room.add("a", 1)
        supervisor = room.supervisor(patience_seconds=0.2)
        await started(room, supervisor, 1)
        room.nodes.remove("a")
        await eventually(lambda: len(room.processes) == 2)
        room.add("b", 1)
        await eventually(lambda: alive(room) == ["inference-1"])
        ended = asyncio.create_task(supervisor.run())
        await asyncio.sleep(0.4)
        assert not ended.done(), "the clock that ran while there was none ran on"

    run(scenario)


def test_a_bug_in_a_vacancy_is_not_waited_past() -> None:
    async def scenario(room: Room) -> None:
        async def broken(process: Any) -> None:
            raise KeyError("a bug")

        room.start = broken  # type: ignore[method-assign]
        room.add("a", 2)
        supervisor = room.supervisor()
        await started(room, supervisor, 1)
        supervisor.invite(1)
        with pytest.raises(KeyError, match="a bug"):
            async with asyncio.timeout(20):
                await supervisor.run()

    run(scenario)
