"""Ray, and nothing else of the run: start it, place worker processes on it, call them with a deadline, stop it.

Every worker is the same actor, `WorkerProcess`, which builds one inference or learner worker inside itself. Whatever
goes wrong in there leaves as one of `olmorl.contract.errors`, so that the driver never unpickles a torch exception.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from olmorl.contract.errors import OlmoRLError, PlacementError, WorkerError, WorkerLostError
from olmorl.controller.placement import Placement, count_gpus

T = TypeVar("T")
log = logging.getLogger(__name__)

LATE_SECONDS = 1.0  # a timer that comes so late was not looked at
THREADS_PER_WORKER = 16  # calls one worker answers at once; most of them wait


class WorkerProcess:
    """Runs inside a Ray actor; `target` is "module:Class" of the worker it holds."""

    def __init__(self, log_path: str) -> None:
        _redirect_output(Path(log_path))
        self._worker: Any = None

    def start(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module, _, name = target.partition(":")
        with _only_our_errors():
            self._worker = getattr(importlib.import_module(module), name)(*args, **kwargs)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        with _only_our_errors():
            return getattr(self._worker, method)(*args)


@contextlib.contextmanager
def _only_our_errors() -> Iterator[None]:
    try:
        yield
    except OlmoRLError as error:
        raise type(error)(str(error)) from None
    except Exception as error:
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        raise WorkerError(f"{type(error).__name__}: {error} ({where})") from None


def _redirect_output(path: Path) -> None:
    """Send what this process prints to its own log file, where the run directory can be reached from this node."""
    if not path.parent.is_dir():
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.close(file)
    faulthandler.enable()


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


class Remote:
    """The driver's handle on one worker process."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    def kill(self) -> None:
        """End the process, whatever it does; it answers nothing more."""
        import ray

        ray.kill(self._actor)

    async def start(self, target: str, *args: Any, timeout: float, **kwargs: Any) -> None:
        await self._get(self._actor.start.remote(target, args, kwargs), "start", timeout)

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Raises what the worker raised, or WorkerLostError if it died or did not answer within `timeout` seconds."""
        return await self._get(self._actor.call.remote(method, args), method, timeout)

    async def _get(self, ref: Any, method: str, timeout: float) -> Any:
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

        try:
            return await answer_within(timeout, asyncio.wrap_future(ref.future()))
        except TimeoutError:
            raise WorkerLostError(f"{self.name} did not answer {method}() within {timeout:g} s") from None
        except RayTaskError as error:
            raise error.cause from None
        except (RayActorError, OutOfMemoryError) as error:  # the second: Ray ended it, short of memory
            reason = str(error).strip().splitlines()[0]
            raise WorkerLostError(f"{self.name} died during {method}(): {reason}") from None


def check_placement(placement: Placement, *, address: str | None) -> None:
    """Raises PlacementError at once for what this machine can never hold. A running cluster is asked when joined."""
    if not _is_running(address):
        placement.check({"CPU": placement.cpus, "GPU": count_gpus()})  # CPUs are ours to declare, see Cluster


def _is_running(address: str | None) -> bool:
    return bool(address or os.environ.get("RAY_ADDRESS"))


class Cluster:
    """A Ray cluster that holds the workers of one run. Use as a context manager: leaving it stops them."""

    def __init__(self, placement: Placement, *, address: str | None, log_dir: Path, start_timeout: float) -> None:
        self._placement = placement
        self._address = address
        self.log_dir = log_dir
        self._start_timeout = start_timeout
        self._actors: list[Any] = []
        self._group: Any = None
        self._joined = _is_running(address)

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
                    address=self._address or os.environ.get("RAY_ADDRESS"),
                    num_cpus=None if self._joined else max(os.cpu_count() or 1, self._placement.cpus),
                    include_dashboard=None if self._joined else False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={"env_vars": {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}},
                )
            self._place()
        except ConnectionError as error:
            raise PlacementError(f"no Ray cluster answers at {self._address}: {error}") from None
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.chdir(here)
        return self

    def _place(self) -> None:
        import ray
        from ray.util import placement_group

        self._placement.check(ray.cluster_resources())
        self._group = placement_group(self._placement.bundles, strategy="PACK")
        ready, _ = ray.wait([self._group.ready()], timeout=self._start_timeout)
        if not ready:
            raise PlacementError(
                f"the cluster did not free {self._placement.describe()} within {self._start_timeout:g} s; "
                f"available now: {_plain(ray.available_resources())}"
            )

    def spawn(self, name: str, slot: int) -> Remote:
        """A worker process in the `slot`-th bundle of the placement, which nobody else may hold any more."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._placement.bundles[slot]
        actor = (
            ray.remote(WorkerProcess)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=THREADS_PER_WORKER,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, slot),
            )
            .remote(str(self.log_dir / f"{name}.log"))
        )
        self._actors.append(actor)
        return Remote(name, actor)

    def __exit__(self, *exc: object) -> None:
        import ray
        from ray.util import remove_placement_group

        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        # A cluster of our own ends as a whole. It may have ended already, when a polite kill went to all processes of
        # a group: then Ray would wait for it a minute, and end this process.
        if self._group is not None and self._joined:
            remove_placement_group(self._group)
        ray.shutdown()


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
