"""The inference workers of a rollout: started together, replaced when one is lost."""

import asyncio
import logging
from itertools import count

from olmorl.contract.errors import ModelError, OlmoRLError, WorkerError
from olmorl.contract.generation import EngineConfig, WorkerInfo
from olmorl.controller.cluster import Cluster, Remote
from olmorl.controller.fleet import INFERENCE_WORKER
from olmorl.controller.rollout import RolloutService

log = logging.getLogger(__name__)

START_SECONDS = 600.0
MAX_RESTARTS = 8


class Engines:
    """`lost` is what a RolloutService calls; `run` raises once no worker is left."""

    def __init__(self, cluster: Cluster, config: EngineConfig, *, workers: int) -> None:
        self._cluster = cluster
        self._config = config
        self._workers = workers
        self._alive: dict[str, Remote] = {}
        self._numbers = count()  # a replacement never takes a name that was there before
        self._replacing: set[asyncio.Task[None]] = set()
        self._restarts = 0
        self._service: RolloutService | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> list[WorkerInfo]:
        """All of them. Raises what a worker says of its model or its device."""
        engines = await asyncio.gather(*(self._start() for _ in range(self._workers)))
        infos = await asyncio.gather(*(engine.call("info", timeout=START_SECONDS) for engine in engines))
        if any(info.tensors != infos[0].tensors for info in infos):
            raise ModelError("the inference workers hold different models; are their model folders the same?")
        return list(infos)

    def serve(self, service: RolloutService) -> None:
        self._service = service
        for engine in self._alive.values():
            service.ensure_worker(engine)

    def lost(self, name: str, reason: str) -> None:
        """Safe to call at any time and more than once."""
        engine = self._alive.pop(name, None)
        if engine is None or self._service is None:
            return
        log.warning("%s is lost: %s", name, reason)
        engine.kill()
        self._service.remove_worker(name)
        if self._restarts < MAX_RESTARTS:
            self._restarts += 1
            task = asyncio.create_task(self._replace())
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)
        elif not self._alive and not self._replacing and not self._failed.done():
            self._failed.set_exception(
                WorkerError(f"no inference worker is left after {self._restarts} restarts; the last one: {reason}")
            )

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            await asyncio.shield(self._failed)
        finally:
            for task in self._replacing:
                task.cancel()
            await asyncio.gather(*self._replacing, return_exceptions=True)

    async def _start(self) -> Remote:
        engine = self._cluster.spawn_engine(f"inference-{next(self._numbers)}")
        try:
            await engine.start(
                INFERENCE_WORKER, self._config, name=engine.name, initial_version=0, timeout=START_SECONDS
            )
        except OlmoRLError:
            engine.kill()
            raise
        self._alive[engine.name] = engine
        return engine

    async def _replace(self) -> None:
        try:
            engine = await self._start()
        except OlmoRLError as error:
            log.warning("a replacement for an inference worker did not start: %s", error)
            if not self._alive and not self._failed.done():
                self._failed.set_exception(WorkerError(f"no inference worker is left: {error}"))
            return
        assert self._service is not None, "a worker is lost only while it serves"
        self._service.ensure_worker(engine)
