"""Updates from a real learner into real engines that decode: whole, equal, in order, and never met by a gather."""

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.managers import BaseManager
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from inference.staged_update import model_checksum
from inference.worker import InferenceWorker
from learner.pack import pack
from learner.worker import LearnerWorker
from olmorl.config.schema import SyncSection
from olmorl.contract.errors import WorkerLostError
from olmorl.contract.generation import EngineConfig, RolloutRequest, SamplingParams, WorkerInfo
from olmorl.contract.training import LearnerConfig, TrainSample
from olmorl.contract.weights import bucket_checksums, combine_checksums, plan_buckets
from olmorl.controller import sync as sync_module
from olmorl.controller.rollout import RolloutService
from olmorl.controller.sync import WeightSync

LONG = SamplingParams(n=8, max_tokens=80, ignore_eos=True, seed=5)
REQUESTS = 200  # more than can be done before the updates are


@pytest.fixture
def learner(quickstart_config: Callable[..., Any]) -> Iterator[LearnerWorker]:
    config = LearnerConfig(model=quickstart_config().model.path, threads=1, lr=1e-2)
    learner = LearnerWorker(config, rank=0, world_size=1)
    learner.name = "learner-0"  # type: ignore[attr-defined]
    learner.start(*learner.host_rendezvous())
    yield learner
    learner.shutdown()


@pytest.fixture
def start_stale(quickstart_config: Callable[..., Any]) -> Iterator[Callable[[str], InferenceWorker]]:
    """An engine as a run starts it: it serves nothing until its first update."""
    workers = []

    def start(name: str) -> InferenceWorker:
        config = EngineConfig(
            model=quickstart_config().model.path, max_num_seqs=16, kv_cache_tokens=4096, max_model_len=100, threads=1
        )
        workers.append(InferenceWorker(config, name=name))
        return workers[-1]

    yield start
    for worker in workers:
        worker.shutdown()


class InProcess:
    """`Remote` without a cluster; `hold` keeps calls of one method back until it is let go."""

    def __init__(self, worker: Any, name: str | None = None) -> None:
        self.worker = worker
        self.name = name or worker.name
        self.calls: list[str] = []
        self.held: dict[str, asyncio.Event] = {}

    def hold(self, method: str) -> asyncio.Event:
        self.held[method] = asyncio.Event()
        return self.held[method]

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        self.calls.append(method)
        if method in self.held:
            await self.held[method].wait()
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.to_thread(getattr(self.worker, method), *args)
        except (TimeoutError, EOFError, ConnectionError) as error:
            raise WorkerLostError(f"{self.name} did not answer {method}()") from error


def run(scenario: Awaitable[None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(100):
            await scenario

    asyncio.run(main())


async def connect(learner: LearnerWorker, engines: list[Any], *, info: WorkerInfo, **settings: Any) -> WeightSync:
    transport = settings.pop("transport", "gloo")
    lost: list[tuple[str, str]] = []

    def on_lost(name: str, reason: str) -> None:
        raise AssertionError(f"{name} was lost: {reason}")

    sync = WeightSync(
        learners=[learner],  # type: ignore[list-item]
        service=RolloutService(on_lost=lambda name, reason: lost.append((name, reason))),
        section=SyncSection(**{"bucket_mb": BUCKET_MB, "timeout_seconds": 20.0, **settings}),
        transport=transport,
        canary=None,
        on_lost=on_lost,
    )
    await sync.connect(info)
    for engine in engines:
        await sync.add(engine)
    return sync


async def close(sync: WeightSync) -> None:
    await sync.close()
    await sync._service.close()


def train(learner: LearnerWorker) -> None:
    """Other weights, the same in every test."""
    rng = np.random.default_rng(3)
    version = learner._trainer.version  # type: ignore[union-attr]
    sample = TrainSample(
        prompt_token_ids=np.array([1, 10, 13, 8], np.int32),
        token_ids=rng.integers(3, 15, 20).astype(np.int32),
        logprobs=np.full(20, -2.0, np.float32),
        token_versions=np.full(20, version, np.int32),
        loss_mask=np.ones(20, bool),
        advantage=1.0,
    )
    learner.train_step(pack([sample], version=version, num_ranks=1, tokens_per_micro_batch=64)[0])


def learner_checksum(learner: LearnerWorker) -> str:
    sender = learner._sender
    assert sender is not None and sender._manifest is not None
    words: dict[str, int] = {}
    for bucket, data in zip(sender._manifest.buckets, sender._buckets, strict=True):
        words |= bucket_checksums(bucket, data.numpy())
    return combine_checksums(words, sender._manifest.tensors)


def watch_steps(worker: InferenceWorker) -> list[tuple[int, str, str]]:
    """For every step from now on: the version it claims, and the weights before and after it."""
    engine, seen = worker._engine, []
    step = engine.step

    def watched() -> Any:
        before = model_checksum(engine.decoder.tensors, engine.decoder.specs)
        result = step()
        seen.append((engine.version, before, model_checksum(engine.decoder.tensors, engine.decoder.specs)))
        return result

    engine.step = watched  # type: ignore[method-assign]
    return seen


def extra_memory(worker: InferenceWorker) -> tuple[int, int]:
    """Bytes that the receiver holds beside the weights: kept between updates, and to pass a bucket through."""
    receiver = worker._receiver
    scratch = 0 if receiver._scratch is None else len(receiver._scratch)
    return sum(len(buffer) for buffer in receiver._buffers.values()), scratch


def expected_memory(transport: str, staging: str, worker: InferenceWorker) -> tuple[int, int]:
    """As the table in docs/architecture.md has it."""
    manifest = plan_buckets(worker.info().tensors, bucket_bytes=BUCKET_MB << 20)
    if transport == "ipc":
        return 0, 0
    if staging == "none":
        return 0, max(bucket.num_bytes for bucket in manifest.buckets)
    return manifest.num_bytes, 0


BUCKET_MB = 1
FINAL: dict[tuple[str, str], str] = {}  # what the engines hold at the end, however it came to them


@pytest.mark.parametrize(
    ("transport", "staging", "mode"),
    [
        ("gloo", "device", "inflight"),
        ("gloo", "host", "inflight"),
        ("gloo", "none", "inflight"),
        ("gloo", "none", "pause"),
        ("ipc", "auto", "inflight"),
        ("ipc", "auto", "pause"),
    ],
)
def test_engines_decode_with_one_whole_version_at_a_time(
    learner: LearnerWorker, start_stale: Callable[[str], InferenceWorker], transport: str, staging: str, mode: str
) -> None:
    """From the first update of a run on. No step sees weights that are torn or of another version than it says."""
    workers = [start_stale(name) for name in ("a", "b")]
    steps = [watch_steps(worker) for worker in workers]
    versions: dict[int, str] = {}
    keys: list[int] = []

    async def scenario() -> None:
        sync = await connect(
            InProcess(learner),
            [InProcess(worker) for worker in workers],
            info=workers[0].info(),
            transport=transport,
            staging=staging,
            mode=mode,
        )
        for version in range(4):
            if version:
                train(learner)
            await sync.snapshot(version)
            versions[version] = learner_checksum(learner)
            report = await sync.publish(version)
            assert report.version == version and report.stall_seconds < 20
            keys.append(learner._sender._store.num_keys())  # type: ignore[union-attr]
            for worker in workers:
                assert worker.weights_checksum() == versions[version]
            if version == 0:
                for worker in workers:
                    prompt = np.array([1, 10, 13, 8], np.int32)
                    requests = [
                        RolloutRequest(
                            request_id=f"{i}", lease=0, prompt_token_ids=prompt, params=LONG, sample_indices=(0, 1)
                        )
                        for i in range(REQUESTS)
                    ]
                    worker.submit(requests)
            for seen in steps:  # decode with each version
                before = len(seen)
                while version > 0 and len(seen) < before + 3:
                    await asyncio.sleep(0.001)
        await close(sync)

    run(scenario())
    assert len(set(versions.values())) == 4, "training left the weights as they were"
    assert len(set(keys)) == 1, "the store where they meet grows with every update"
    for seen in steps:
        assert {version for version, _, _ in seen} >= {1, 2, 3}
        for version, before, after in seen:
            assert before == after == versions[version], f"a step at version {version} saw other weights"
    for worker in workers:
        assert extra_memory(worker) == expected_memory(transport, staging, worker)
    FINAL[transport, staging] = versions[3]
    assert len(set(FINAL.values())) == 1, "the same updates over another path came out different"


def test_a_gather_waits_until_a_newcomer_holds_what_was_sent(
    learner: LearnerWorker, start_stale: Callable[[str], InferenceWorker]
) -> None:
    """A replacement is sent the version before while the learner has the next one ready."""
    first, late = start_stale("first"), start_stale("late")

    async def scenario() -> None:
        sender, newcomer = InProcess(learner), InProcess(late)
        sync = await connect(sender, [InProcess(first)], info=first.info())
        await sync.snapshot(0)
        await sync.publish(0)
        receiving = newcomer.hold("receive_weights")
        await sync.add(newcomer)
        while "receive_weights" not in newcomer.calls:
            await asyncio.sleep(0.001)
        train(learner)
        before = sender.calls.count("gather_update")
        snapshot = asyncio.create_task(sync.snapshot(1))
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert sender.calls.count("gather_update") == before, "gathered into what was being sent"
        receiving.set()
        await snapshot
        assert late._engine.version == 0
        await sync.publish(1)
        assert (first._engine.version, late._engine.version) == (1, 1)
        assert first.weights_checksum() == late.weights_checksum() == learner_checksum(learner)
        await close(sync)

    run(scenario())


def test_an_engine_whose_weights_are_not_the_learners_is_evicted(
    learner: LearnerWorker, start_stale: Callable[[str], InferenceWorker]
) -> None:
    """Bytes that changed on the way, and bytes that arrived well and were not put in place."""
    good, garbled, lazy = (start_stale(name) for name in ("good", "garbled", "lazy"))
    evicted: dict[str, str] = {}

    async def scenario() -> None:
        sync = await connect(InProcess(learner), [InProcess(w) for w in (good, garbled, lazy)], info=good.info())
        sync._on_lost = evicted.__setitem__
        await sync.snapshot(0)
        assert (await sync.publish(0)).checksum_ok == 1
        take, commit = garbled._receiver.take, lazy._engine.commit

        def take_garbled(version: int, checksums: dict[str, int]) -> Any:
            name = next(iter(checksums))
            garbled._receiver._received.update.checksums[name] ^= 1  # type: ignore[union-attr]
            return take(version, checksums)

        def commit_but_one(staged: Any, *args: Any, **options: Any) -> float:
            name = next(iter(staged.tensors))
            lazy._engine.decoder.tensors[name], kept = (
                torch.empty_like(staged.tensors[name]),
                lazy._engine.decoder.tensors[name],
            )
            seconds = commit(staged, *args, **options)
            lazy._engine.decoder.tensors[name] = kept
            return seconds

        garbled._receiver.take, lazy._engine.commit = take_garbled, commit_but_one  # type: ignore[method-assign]
        train(learner)
        await sync.snapshot(1)
        report = await sync.publish(1)
        assert report.checksum_ok == pytest.approx(1 / 3)
        assert [engine.name for engine in sync.serving] == ["good"]
        await close(sync)

    run(scenario())
    assert "differ from the sender's" in evicted["garbled"] and "are not what was received" in evicted["lazy"]


def test_a_bug_while_an_update_is_sent_is_not_waited_past(
    learner: LearnerWorker, start_stale: Callable[[str], InferenceWorker]
) -> None:
    engine = start_stale("engine")

    def broken(version: int) -> None:
        raise KeyError("a bug")

    async def scenario() -> None:
        sync = await connect(InProcess(learner), [InProcess(engine)], info=engine.info(), timeout_seconds=5.0)
        await sync.snapshot(0)
        learner.broadcast = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyError, match="a bug"):
            async with asyncio.timeout(4):
                await sync.publish(0)
        await close(sync)

    run(scenario())


class Apart:
    """An engine in a process of its own."""

    def __init__(self, model: str) -> None:
        BaseManager.register("InferenceWorker", InferenceWorker)
        self._manager = BaseManager(ctx=multiprocessing.get_context("spawn"))
        self._manager.start()
        config = EngineConfig(model=model, max_num_seqs=4, kv_cache_tokens=1024, max_model_len=100, threads=1)
        self.worker = self._manager.InferenceWorker(config, name="apart")  # type: ignore[attr-defined]
        self.info: WorkerInfo = self.worker.info()

    def stop(self) -> None:
        """Returns when each thread stands still: on a busy machine some still take what comes in."""
        os.kill(self.info.pid, signal.SIGSTOP)
        for thread in psutil.Process(self.info.pid).threads():
            while psutil.Process(thread.id).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)

    def close(self) -> None:
        os.kill(self.info.pid, signal.SIGCONT)
        self._manager.shutdown()


def test_a_stopped_engine_is_named_within_seconds_and_may_go_on(
    learner: LearnerWorker,
    quickstart_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sync_module, "STALL_REPORT_SECONDS", 0.2)
    apart = Apart(quickstart_config().model.path)

    async def scenario() -> None:
        sync = await connect(InProcess(learner), [InProcess(apart.worker, "apart")], info=apart.info)
        await sync.snapshot(0)
        await sync.publish(0)
        train(learner)
        await sync.snapshot(1)
        apart.stop()
        update = asyncio.create_task(sync.publish(1))
        while not any("apart" in record.message for record in caplog.records):
            assert not update.done()
            await asyncio.sleep(0.01)
        os.kill(apart.info.pid, signal.SIGCONT)
        assert (await update).version == 1
        await close(sync)

    with caplog.at_level(logging.WARNING):
        run(scenario())
    (message, *_) = [record.message for record in caplog.records if "apart" in record.message]
    assert message.startswith("version 1 waits for apart to send or stage version 1, since ")
    apart.close()


def test_a_learner_that_does_not_gather_is_named(
    learner: LearnerWorker,
    start_stale: Callable[[str], InferenceWorker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sync_module, "STALL_REPORT_SECONDS", 0.05)
    engine = start_stale("a")

    async def scenario() -> None:
        sender = InProcess(learner)
        sync = await connect(sender, [InProcess(engine)], info=engine.info())
        gathering = sender.hold("gather_update")
        snapshot = asyncio.create_task(sync.snapshot(0))
        while not caplog.records:
            await asyncio.sleep(0.01)
        gathering.set()
        await snapshot
        await close(sync)

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert caplog.records[0].message.startswith("gather_update() waits for learner-0, since ")
