"""Ray, and nothing else of the run: start it, place worker processes on it, call them with a deadline, stop it.

Every worker is the same actor, `WorkerProcess`, which builds one inference or learner worker inside itself.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import olmorl
from olmorl.contract.errors import PlacementError, WorkerLostError
from olmorl.controller.placement import Bundle, Node, Placement
from olmorl.controller.worker_process import WorkerProcess

T = TypeVar("T")
log = logging.getLogger(__name__)

LATE_SECONDS = 1.0  # a timer that comes so late was not looked at
PACKAGES = ("olmorl", "inference", "learner")
THREADS_PER_WORKER = 16  # calls one worker answers at once; most of them wait
POLL_SECONDS = 1.0


async def answer_within(seconds: float, answer: "asyncio.Future[T]") -> T:
    """Wait for `answer`. Raises TimeoutError after `seconds` in which this process was there to receive it.

    A driver that was stopped, or a laptop that was shut, finds all its deadlines passed when it wakes up; its workers
    have answered long ago. So a deadline that is noticed late gives one more chance.
    """
    loop = asyncio.get_running_loop()
    try:
        while True:
            deadline = loop.time() + seconds
            try:
                async with asyncio.timeout_at(deadline):  # wait_for of Python 3.11 may swallow a cancellation
                    return await asyncio.shield(answer)
            except TimeoutError:
                if loop.time() < deadline + LATE_SECONDS:
                    raise
    finally:
        answer.cancel()


class Reservation:
    """Resources for a group of processes that belong together: held from when they are free until released.

    Either all bundles are held or none. A process may be spawned in one before it is held, and starts then.
    """

    def __init__(self, bundles: list[Bundle], *, one_node: bool = False) -> None:
        from ray.util import placement_group

        self.bundles = bundles
        self._group = placement_group(bundles, strategy="STRICT_PACK" if one_node else "PACK")

    def is_held(self, *, timeout: float) -> bool:
        """Waits up to `timeout` seconds for it."""
        return self._group.wait(timeout)

    def order(self) -> list[int]:
        """Indices of the bundles, those on one node side by side."""
        from ray.util import placement_group_table

        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return sorted(range(len(self.bundles)), key=lambda index: (nodes[index], index))

    def options(self, index: int) -> dict[str, Any]:
        """Of an actor in the bundle of that index."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self.bundles[index]
        return {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
        }

    def release(self) -> None:
        from ray.util import remove_placement_group

        remove_placement_group(self._group)


class Remote:
    """The driver's handle on one worker process."""

    def __init__(self, name: str, actor: Any, *, give_back: Callable[[], None] | None = None) -> None:
        """`give_back`: what becomes of its place when it is killed."""
        self.name = name
        self.node = ""
        """id of the cluster's node that it is on, once it is placed"""
        self._actor = actor
        self._give_back = give_back

    def kill(self) -> None:
        """End the process, whatever it does, and give back what it held; it answers nothing more."""
        import ray

        ray.kill(self._actor)
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    async def placed(self) -> None:
        """Wait until the cluster has room for the process and it runs: as long as that takes."""
        from ray.exceptions import RayError

        try:
            self.node = await asyncio.wrap_future(self._actor.node.remote().future())
        except RayError as error:
            raise WorkerLostError(f"{self.name} could not be placed: {_first_line(error)}") from None

    async def start(self, target: str, *args: Any, timeout: float, **kwargs: Any) -> None:
        await self._get(self._actor.start.remote(target, args, kwargs), "start", timeout)

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Raises what the worker raised, or WorkerLostError if it died or did not answer within `timeout` seconds."""
        return await self._get(self._actor.call.remote(method, args), method, timeout)

    async def _get(self, ref: Any, method: str, timeout: float) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await answer_within(timeout, asyncio.wrap_future(ref.future()))
        except TimeoutError:
            raise WorkerLostError(f"{self.name} did not answer {method}() within {timeout:g} s") from None
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:  # it died, was ended for want of memory, or its answer was lost with its node
            raise WorkerLostError(f"{self.name} died during {method}(): {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def cluster_address(configured: str | None) -> str | None:
    """Of the running cluster that a run joins; None: it starts one of its own on this machine."""
    return configured or os.environ.get("RAY_ADDRESS") or None


class Cluster:
    """A Ray cluster, and the workers of one run on it. Use as a context manager: leaving it stops them."""

    def __init__(self, *, address: str | None, cpus: int, log_dir: Path) -> None:
        """`address` of a running cluster; None starts one here that has at least `cpus` CPUs to give."""
        self.log_dir = log_dir
        self._address = address
        self._joined = address is not None
        self._cpus = cpus
        self._actors: list[Any] = []
        self._reservations: list[Reservation] = []
        self._engine_bundles: list[Bundle] = []
        self._for_engines: list[tuple[Reservation, int]] = []  # that no process is in
        self._for_learners: list[tuple[Reservation, int]] = []
        self._shares_gpu = False

    def __enter__(self) -> "Cluster":
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        here = os.getcwd()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        # Ray puts the driver's current directory first on the workers' path: a stray inference.py there would
        # shadow the package, so start from the log directory, which holds no Python file.
        os.chdir(self.log_dir)
        try:
            with _interrupts_deferred():
                ray.init(
                    address=self._address or "local",  # without a word Ray would join what runs on this machine
                    num_cpus=None if self._joined else max(os.cpu_count() or 1, self._cpus),
                    include_dashboard=None if self._joined else False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env=_runtime_env(ship_source=self._joined),
                )
        except ConnectionError as error:
            raise PlacementError(f"no Ray cluster answers at {self._address}: {error}") from None
        except BaseException as error:
            self.__exit__()
            if "timed out during startup" in str(error):  # a bare Exception of Ray's
                raise PlacementError(
                    "Ray did not start here within the 30 s that it gives itself; end what else keeps the machine busy "
                    "and start again (a run: with --resume)"
                ) from None
            raise
        finally:
            os.chdir(here)
        return self

    def nodes(self) -> list[Node]:
        """Those that are alive, with all they have, in use or not."""
        import ray

        return [
            Node.of(node["NodeManagerAddress"], node["Resources"], id=node["NodeID"])
            for node in ray.nodes()
            if node["Alive"]
        ]

    def has_node(self, node_id: str) -> bool:
        import ray

        return any(node["Alive"] and node["NodeID"] == node_id for node in ray.nodes())

    def wait_for_nodes(self, count: int, *, timeout: float) -> None:
        """Until the cluster has so many. Raises PlacementError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while len(nodes := self.nodes()) < count:
            if time.monotonic() > deadline:
                raise PlacementError(
                    f"{len(nodes)} of cluster.nodes = {count} nodes joined within {timeout:g} s: "
                    f"{'; '.join(map(str, nodes))}. See why the others did not, or lower cluster.nodes"
                )
            time.sleep(POLL_SECONDS)

    def wait_for_room(self, placement: Placement, *, timeout: float) -> None:
        """Until nodes that could hold it are there: those that were lost may come back, or others in their place."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return placement.check(self.nodes())
            except PlacementError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_SECONDS)

    def reserve(self, placement: Placement, *, timeout: float) -> None:
        """Hold what the workers need. Raises PlacementError if the cluster cannot, or does not within `timeout` s."""
        import ray

        placement.check(self.nodes())
        self._engine_bundles, self._shares_gpu = placement.engine_bundles, placement.shares_gpu
        number = placement.inference_workers
        if placement.shares_gpu:
            shared = self._reserve([*placement.engine_bundles * number, *placement.learner_bundles[0]], one_node=True)
            self._for_engines = [(shared, index) for index in range(number)]
            self._for_learners = [(shared, number)]
            learners = []
        else:
            learners = [self._reserve(shard_group) for shard_group in placement.learner_bundles]
            self._for_engines = [(self._reserve(placement.engine_bundles), 0) for _ in range(number)]
        deadline = time.monotonic() + timeout
        for reservation in self._reservations:
            while not reservation.is_held(timeout=POLL_SECONDS):  # a short wait, which Ctrl-C can end
                if time.monotonic() > deadline:
                    raise PlacementError(
                        f"the cluster did not free {placement.describe()} within {timeout:g} s; "
                        f"available now: {_plain(ray.available_resources())}. End what else runs there, or add nodes"
                    )
        self._for_learners += [(reservation, index) for reservation in learners for index in reservation.order()]

    def spawn_learner(self, name: str) -> Remote:
        """In one of the places reserved. Call it for each rank in turn: ranks of a shard group are side by side."""
        reservation, index = self._for_learners.pop(0)
        return self._spawn(name, reservation.options(index))

    def spawn_engine(self, name: str) -> Remote:
        """In a place reserved, or in another as soon as the cluster has room; `Remote.placed` waits for that."""
        place = self._for_engines.pop(0) if self._for_engines else (self._reserve(self._engine_bundles), 0)
        reservation, index = place
        return self._spawn(name, reservation.options(index), give_back=partial(self._vacate, place))

    def spawn_on(self, node: Node, name: str) -> Remote:
        """A process on that node that takes none of its resources."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return self._spawn(
            name, {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}
        )

    def _reserve(self, bundles: list[Bundle], *, one_node: bool = False) -> Reservation:
        self._reservations.append(Reservation(bundles, one_node=one_node))
        return self._reservations[-1]

    def _vacate(self, place: tuple[Reservation, int]) -> None:
        """The next engine takes the place over, unless it may be gone with its node while there is room on another."""
        reservation, _ = place
        if self._joined and not self._shares_gpu:
            self._reservations.remove(reservation)
            reservation.release()
        else:
            self._for_engines.append(place)

    def _spawn(self, name: str, options: dict[str, Any], *, give_back: Callable[[], None] | None = None) -> Remote:
        import ray

        actor = (
            ray.remote(WorkerProcess)
            .options(max_concurrency=THREADS_PER_WORKER, **options)
            .remote(str(self.log_dir / f"{name}.log"))
        )
        self._actors.append(actor)
        return Remote(name, actor, give_back=give_back)

    def __exit__(self, *exc: object) -> None:
        import ray

        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        # A cluster of our own ends as a whole. It may have ended already, when a polite kill went to all processes of
        # a group: then Ray would wait for it a minute, and end this process.
        if self._joined:
            for reservation in self._reservations:
                reservation.release()
        ray.shutdown()


def _runtime_env(*, ship_source: bool) -> dict[str, Any]:
    """Of all workers. Our packages go to other machines as they are here, once to each node."""
    source = Path(olmorl.__file__).resolve().parents[1]
    return {
        "env_vars": {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"},
        **({"py_modules": [str(source / name) for name in PACKAGES]} if ship_source else {}),
    }


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; a second one does not.

    Ray leaves processes behind when its start is broken off half-way, and it puts a handler of its own on SIGTERM.
    """
    caught: list[int] = []
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    deferred = [number for number, handler in handlers.items() if callable(handler)]
    if threading.current_thread() is not threading.main_thread():
        deferred = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        signal.signal(number, handlers[number])

    for number in deferred:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in deferred:
            signal.signal(number, handlers[number])
    if caught:
        raise KeyboardInterrupt


def _plain(resources: dict[str, float]) -> str:
    wanted = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    return ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
