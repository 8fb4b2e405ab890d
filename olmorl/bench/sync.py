"""What a weight update costs engines under load: in flight, with a pause, and with a drain before it.

Real worker processes and a real transport. The learner does not train: a batch without samples makes the next version
of the same weights, so that everything measured is the update's. Each engine is kept busy with groups of random prompts
whose lengths differ; EOS is ignored. Windows with an update and without one take turns, so that a machine that becomes
slower or faster meanwhile does so for both.
"""

import asyncio
import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from inference.model.architecture import read_architecture
from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import SamplingParams
from olmorl.contract.training import RankBatch
from olmorl.controller.cluster import Cluster, cluster_address
from olmorl.controller.compose import sync_transport
from olmorl.controller.fleet import Fleet, start_fleet
from olmorl.controller.placement import plan_placement
from olmorl.controller.rollout import RolloutService
from olmorl.controller.sync import UpdateReport, WeightSync

log = logging.getLogger(__name__)

PROMPT_TOKENS = 32
GROUP = 8
SAMPLE_SECONDS = 0.25  # between two looks at the engines' counters
ANSWER_SECONDS = 60.0
STANDING_UPDATES = 3  # in each of the modes that stop the engines

Mode = Literal["inflight", "pause", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLoad:
    engines: int = 2
    live: int = 16
    """samples that an engine decodes at once"""
    max_tokens: int = 128
    """of the longest sample; the shortest has a quarter"""
    seconds: float = 120.0
    """with an update in flight every `interval` seconds, and as long without any"""
    interval: float = 10.0


@dataclass(slots=True)
class Window:
    """What the engines did in some seconds, and the updates that fell into them."""

    seconds: float = 0.0
    tokens: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)
    snapshot_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def bench_sync(model: str, load: SyncLoad, overrides: list[str]) -> dict[str, Any]:
    """`overrides` are settings of a run: sync.transport=ipc, inference.device=cuda, model.dtype=bfloat16 and so on."""
    vocabulary = read_architecture(Path(model)).vocab_size
    config = load_config(
        None,
        [
            f"model.path={model}",
            "data.train=none",  # nothing is read
            f"inference.workers={load.engines}",
            f"inference.max_num_seqs={load.live}",
            f"inference.kv_cache_tokens={2 * (load.live + GROUP) * (PROMPT_TOKENS + load.max_tokens)}",
            f"rollout.max_prompt_tokens={PROMPT_TOKENS}",
            f"rollout.max_response_tokens={load.max_tokens}",
            "inference.threads=1",
            "learner.threads=1",
            *overrides,
        ],
    )
    return asyncio.run(_bench(config, load, vocabulary))


async def _bench(config: Config, load: SyncLoad, vocabulary: int) -> dict[str, Any]:
    pairs: dict[Mode, tuple[Window, Window]] = {}
    async with _Bench.open(config, load, vocabulary) as bench:
        await bench.window(Window(), load.interval / 2)  # the first steps fill the batch
        updates = max(1, round(load.seconds / load.interval))
        pairs["inflight"] = await bench.pair("inflight", updates, load.interval)
        pairs["pause"] = await bench.pair("pause", STANDING_UPDATES, load.interval / 2)
        pairs["drain"] = await bench.pair("drain", STANDING_UPDATES, load.interval / 2)
    without = pairs["inflight"][1]
    step = statistics.median(without.step_seconds)
    return {
        "bytes": pairs["inflight"][0].reports[0].num_bytes,
        "engines": load.engines,
        "transport": bench.transport,
        "decode_step_seconds": step,
        "tokens_per_second_without": without.tokens_per_second,
        "modes": {mode: _figures(*pair, step) for mode, pair in pairs.items()},
    }


def _figures(window: Window, without: Window, step_seconds: float) -> dict[str, float]:
    """Medians over updates. `tokens_share` is that of the windows without an update between those with one, and
    `lost_seconds` the same as seconds an update."""
    reports = window.reports
    seconds = statistics.median(report.seconds for report in reports)
    stall = statistics.median(report.stall_seconds for report in reports)
    share = window.tokens_per_second / without.tokens_per_second
    return {
        "updates": len(reports),
        "seconds": seconds,
        "snapshot_seconds": statistics.median(window.snapshot_seconds),
        "gb_per_second": reports[0].num_bytes / seconds / 1e9,
        "stall_seconds": stall,
        "stall_steps": stall / step_seconds,
        "stall_seconds_max": max(report.stall_seconds for report in reports),
        "lost_seconds": window.seconds * (1 - share) / len(reports),
        "tokens_per_second": window.tokens_per_second,
        "tokens_share": share,
    }


class _Bench:
    def __init__(self, load: SyncLoad, fleet: Fleet, service: RolloutService, sync: WeightSync, transport: str) -> None:
        self.transport = transport
        self._load = load
        self._fleet = fleet
        self._service = service
        self._sync = sync
        self._version = 0
        self._numbers = iter(range(1 << 62))

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config, load: SyncLoad, vocabulary: int) -> AsyncIterator["_Bench"]:
        """Workers that stand, hold version 0, and are kept busy."""
        address, cpus = cluster_address(config.cluster.address), plan_placement(config).cpus
        with (
            tempfile.TemporaryDirectory() as logs,
            Cluster(address=address, cpus=cpus, log_dir=Path(logs)) as cluster,
        ):
            placement = plan_placement(config, None if address is None else cluster.nodes())
            cluster.reserve(placement, timeout=config.cluster.start_timeout_seconds)
            fleet = await start_fleet(config, cluster=cluster, placement=placement)
            service = RolloutService(on_lost=_raise)
            transport = sync_transport(config, placement)
            sync = WeightSync(
                learners=fleet.learners,
                service=service,
                section=config.sync,
                transport=transport,
                canary=None,
                on_lost=_raise,
            )
            bench = cls(load, fleet, service, sync, transport)
            await sync.connect(fleet.engine_infos[0])
            for engine in fleet.engines:
                await sync.add(engine)
            await sync.snapshot(0)
            await sync.publish(0)
            groups = -(-load.engines * (load.live + GROUP) // GROUP)
            requests = [asyncio.create_task(bench._keep_busy(i, vocabulary)) for i in range(groups)]
            try:
                yield bench
            finally:
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)
                await sync.close()
                await service.close()

    async def pair(self, mode: Mode, updates: int, seconds: float) -> tuple[Window, Window]:
        """Windows with an update in the middle and, before each, one without: all of a kind added up."""
        self._sync.mode = mode
        window, without = Window(), Window()
        for _ in range(updates):
            await self.window(without, seconds)
            await self.window(window, seconds, update=True)
        return window, without

    async def window(self, window: Window, seconds: float, *, update: bool = False) -> None:
        """Let the engines decode for so long, or for as long as the update takes beside it, and count."""
        started, before = time.perf_counter(), await self._counters()
        ended = asyncio.Event()
        watching = asyncio.create_task(self._watch(window, ended))
        await asyncio.sleep(seconds / 2)
        if update:
            await self._update(window)
        await asyncio.sleep(max(0.0, started + seconds - time.perf_counter()))
        ended.set()
        await watching
        window.tokens += _made(before, await self._counters())
        window.seconds += time.perf_counter() - started

    async def _watch(self, window: Window, ended: asyncio.Event) -> None:
        """The mean step of each short while, and of the last one."""
        last = await self._counters()
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAMPLE_SECONDS):
                    await ended.wait()
            counters = await self._counters()
            for old, new in zip(last, counters, strict=True):
                if new["steps"] > old["steps"]:
                    busy = new["busy_seconds"] - old["busy_seconds"]
                    window.step_seconds.append(busy / (new["steps"] - old["steps"]))
            last = counters

    async def _update(self, window: Window) -> None:
        step = RankBatch(version=self._version, mini_batches=())
        await asyncio.gather(*(x.call("train_step", step, timeout=ANSWER_SECONDS) for x in self._fleet.learners))
        self._version += 1
        started = time.perf_counter()
        await self._sync.snapshot(self._version)
        window.snapshot_seconds.append(time.perf_counter() - started)
        window.reports.append(await self._sync.publish(self._version))
        log.info("update %d, %s: %s", self._version, self._sync.mode, window.reports[-1])

    async def _keep_busy(self, number: int, vocabulary: int) -> None:
        """One group after the other."""
        rng = np.random.default_rng(number)
        while True:
            prompt = rng.integers(0, vocabulary, PROMPT_TOKENS).astype(np.int32)
            length = int(rng.integers(self._load.max_tokens // 4, self._load.max_tokens + 1))
            params = SamplingParams(n=GROUP, max_tokens=max(1, length), ignore_eos=True, seed=number)
            async for _ in self._service.generate(f"{number}/{next(self._numbers)}", prompt, params):
                pass

    async def _counters(self) -> list[dict[str, float]]:
        return await asyncio.gather(*(x.call("stats", timeout=ANSWER_SECONDS) for x in self._fleet.engines))


def _made(before: list[dict[str, float]], after: list[dict[str, float]]) -> float:
    return sum(new["output_tokens"] - old["output_tokens"] for old, new in zip(before, after, strict=True))


def _raise(name: str, reason: str) -> None:
    raise WorkerError(f"{name} was lost: {reason}")
