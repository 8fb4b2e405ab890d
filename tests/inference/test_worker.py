"""The worker's doors, and a broadcast from another process into an engine that goes on decoding."""

import multiprocessing
import pickle
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from inference import LLM, SamplingParams
from inference.staged_update import check_tensor
from inference.worker import InferenceWorker
from olmorl.contract.errors import ConfigError, ModelError, SyncError, WeightUpdateError, WorkerError
from olmorl.contract.generation import EngineConfig, RolloutRequest, RolloutSample
from olmorl.contract.training import ScoreRequest
from olmorl.contract.weights import SyncGroup, TensorSpec, combine_checksums, plan_buckets, tensor_checksum

BUCKET_BYTES = 4096
LONG = SamplingParams(n=4, seed=1, max_tokens=100, ignore_eos=True)
INT8 = {"quantization": "int8", "quantize_head": True}
INT4 = {"quantization": "int4", "quantize_head": True}


@pytest.fixture
def options() -> dict[str, Any]:
    """Of the engine; a test that wants others is parametrised by this name."""
    return {}


@pytest.fixture
def worker(model_folder: str, options: dict[str, Any]) -> Iterator[InferenceWorker]:
    worker = InferenceWorker(EngineConfig(model=model_folder, threads=1, **options), name="engine-0")
    yield worker
    worker.shutdown()


def request(number: int, params: SamplingParams = LONG, *, prompt: tuple[int, ...] = (1, 10, 2, 11)) -> RolloutRequest:
    return RolloutRequest(
        request_id=str(number),
        lease=7,
        prompt_token_ids=np.array(prompt, np.int32),
        params=params,
        sample_indices=tuple(range(params.n)),
    )


def collect(worker: InferenceWorker, count: int) -> list[RolloutSample]:
    samples: list[RolloutSample] = []
    deadline = time.monotonic() + 30
    while len(samples) < count and time.monotonic() < deadline:
        samples += worker.drain(1.0).samples
    return samples


def test_samples_come_back_one_by_one(worker: InferenceWorker, model_folder: str) -> None:
    worker.submit([request(0), request(1, SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True))])
    samples = collect(worker, 6)
    assert {s.request_id for s in samples[:2]} == {"1"}, "the short ones need not wait for the long ones"
    expected = LLM(model_folder).generate([[1, 10, 2, 11]], LONG)[0].samples
    for sample in samples[2:]:
        assert sample.token_ids.tolist() == expected[sample.sample_index].token_ids
        assert sample.text == expected[sample.sample_index].text and sample.text
        assert sample.version_spans == ((-1, 0, 100),) and sample.lease == 7 and sample.worker == "engine-0"
        assert sample.logprobs.dtype == sample.raw_logprobs.dtype == np.float32
        assert 0 < sample.t_first_token <= sample.t_finished
    reply = worker.drain(0.0)
    assert reply.samples == () and reply.queued == 0
    assert reply.stats["output_tokens"] == 410 and reply.stats["flops"] > 0 and reply.stats["bytes"] > 0
    assert all(isinstance(value, int | float) for value in reply.stats.values())
    pickle.loads(pickle.dumps(reply))


def test_info(worker: InferenceWorker) -> None:
    info = worker.info()
    assert info.peak_flops > 1e8 and info.peak_bandwidth > 1e8 and "measured" in info.peak_source
    assert info.num_parameters == sum(int(np.prod(spec.shape)) for spec in info.tensors)
    assert "model.layers.1.self_attn.k_proj.weight" in {spec.name for spec in info.tensors}


def test_pause_stops_steps_and_keeps_requests(worker: InferenceWorker, model_folder: str) -> None:
    worker.submit([request(0)])
    worker.pause()
    steps = worker.drain(0.0).stats["steps"]
    assert not worker.wait_idle(0.05)
    assert worker.drain(0.0).stats["steps"] == steps
    worker.resume()
    samples = collect(worker, 4)
    assert worker.wait_idle(30) and len(samples) == 4
    never_paused = LLM(model_folder).generate([[1, 10, 2, 11]], LONG)[0].samples
    for sample in samples:
        assert sample.token_ids.tolist() == never_paused[sample.sample_index].token_ids


def test_abort_hands_back_what_there_is(worker: InferenceWorker) -> None:
    worker.pause()
    worker.submit([request(0), request(1)])
    worker.abort(["0", "unknown"])
    samples = worker.drain(5.0).samples
    assert {(s.request_id, s.finish_reason) for s in samples} == {("0", "abort")} and len(samples) == 4
    worker.resume()
    assert {s.request_id for s in collect(worker, 4)} == {"1"}


def test_bad_requests_are_config_errors_and_none_is_taken(worker: InferenceWorker) -> None:
    worker.pause()
    for bad in (request(1, prompt=(99,)), request(0), request(1, prompt=())):
        with pytest.raises(ConfigError):
            worker.submit([request(0), bad])
    assert worker.drain(0.0).queued == 0
    with pytest.raises(ModelError):
        InferenceWorker(EngineConfig(model="/nowhere"), name="none")


def test_score_while_decoding(worker: InferenceWorker, model_folder: str) -> None:
    sequences = (np.array([1, 10, 2, 11], np.int32), np.arange(20, dtype=np.int32))
    worker.submit([request(0)])
    scores = worker.score(ScoreRequest(sequences=sequences))
    expected = LLM(model_folder).score(sequences)
    for found, wanted in zip(scores, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(ConfigError, match="a sequence to score is 2 to max_model_len"):
        worker.score(ScoreRequest(sequences=(np.array([1]),)))


def test_a_crash_of_the_engine_surfaces_in_every_call(worker: InferenceWorker) -> None:
    waiting: list[BaseException] = []

    def drain() -> None:
        try:
            worker.drain(30.0)
        except WorkerError as error:
            waiting.append(error)

    thread = threading.Thread(target=drain)
    thread.start()
    worker._engine.runner.pools = None  # type: ignore[assignment]
    worker.submit([request(0)])
    thread.join(10)
    assert len(waiting) == 1 and "the engine stopped" in str(waiting[0])
    for call in (
        lambda: worker.drain(0.0),
        lambda: worker.submit([request(1)]),
        lambda: worker.wait_idle(1.0),
        worker.pause,
        worker.weights_checksum,
    ):
        with pytest.raises(WorkerError, match="the engine stopped"):
            call()


def send_updates(pipe: Any, specs: tuple[TensorSpec, ...]) -> None:
    """Rank 0 in a process of its own: hosts the store, then broadcasts whatever it is told to."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    manifest = plan_buckets(specs, bucket_bytes=BUCKET_BYTES)
    group = None
    while (order := pipe.recv()) is not None:
        kind, value = order
        if kind == "join":
            prefixed = dist.PrefixStore(f"sync/{value}", store)
            group = dist.ProcessGroupGloo(prefixed, 0, 2, timedelta(seconds=20))
            continue
        checksums = {}
        for bucket in manifest.buckets[: 2 if kind == "half" else None]:
            buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                part = buffer[offset : offset + spec.num_bytes]
                part.copy_(torch.from_numpy(value[spec.name]).view(torch.uint8).flatten())
                checksums[spec.name] = tensor_checksum(part.numpy())
            group.broadcast([buffer], dist.BroadcastOptions()).wait()
        pipe.send(checksums)


def new_weights(worker: InferenceWorker, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {s.name: rng.normal(0, 0.2, s.shape).astype(np.float32) for s in worker.info().tensors}


@pytest.fixture
def sender(worker: InferenceWorker) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_updates, args=(theirs, worker.info().tensors), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join(10)
    if process.is_alive():
        process.kill()


def join(worker: InferenceWorker, sender: Any, *, epoch: int, port: int, timeout: float = 20.0) -> None:
    sender.send(("join", epoch))
    worker.join_sync_group(
        SyncGroup(epoch=epoch, host="127.0.0.1", port=port, rank=1, size=2, transport="gloo", timeout_seconds=timeout)
    )


@pytest.mark.parametrize("options", [{}, INT8], ids=["float32", "int8"])
def test_broadcast_into_a_live_engine(
    worker: InferenceWorker, sender: Any, model_folder: str, options: dict[str, Any]
) -> None:
    port = sender.recv()
    worker.plan_updates(BUCKET_BYTES)
    assert len(plan_buckets(worker.info().tensors, bucket_bytes=BUCKET_BYTES).buckets) > 3
    join(worker, sender, epoch=0, port=port)
    long = SamplingParams(n=32, seed=1, max_tokens=110, ignore_eos=True)
    worker.submit([request(number, long) for number in range(100)])  # more than can be done before the updates are
    reports = []
    for version in range(3):
        update = new_weights(worker, version)
        sender.send(("whole", update))
        worker.receive_weights(version)
        checksums = sender.recv()
        reports.append(worker.commit_weights(version, checksums))
        assert reports[-1].checksum == worker.weights_checksum() == combine_checksums(checksums, worker.info().tensors)
        assert 0 < reports[-1].stall_seconds < 5 and reports[-1].receive_seconds > 0
    worker.abort([str(number) for number in range(100)])
    samples = collect(worker, 3200)
    assert len(samples) == 3200
    versions = {version for sample in samples for version, _, _ in sample.version_spans}
    assert len(versions) > 1 and any(len(sample.version_spans) > 1 for sample in samples), "updates met live requests"
    for sample in samples:
        ends = [0, *(end for _, _, end in sample.version_spans)]
        assert [start for _, start, _ in sample.version_spans] == ends[:-1] and ends[-1] == len(sample.token_ids)
        assert [v for v, _, _ in sample.version_spans] == sorted({v for v, _, _ in sample.version_spans})
    cold = LLM(model_folder, **options)
    cold.update_weights(((name, torch.from_numpy(array)) for name, array in update.items()), version=1)
    worker.submit([request(100)])
    wanted = cold.generate([[1, 10, 2, 11]], LONG)[0].samples
    for sample in collect(worker, 4):
        assert sample.token_ids.tolist() == wanted[sample.sample_index].token_ids


def test_a_bad_broadcast_changes_nothing(worker: InferenceWorker, sender: Any) -> None:
    port = sender.recv()
    before = worker.weights_checksum()
    with pytest.raises(SyncError, match="no sync group"):
        worker.receive_weights(0)
    worker.plan_updates(BUCKET_BYTES)
    join(worker, sender, epoch=0, port=port)

    update = new_weights(worker, 0)
    sender.send(("whole", update))
    worker.receive_weights(0)
    checksums = sender.recv()
    name = next(iter(checksums))
    with pytest.raises(WeightUpdateError, match="differ from the sender's"):
        worker.commit_weights(0, checksums | {name: checksums[name] ^ 1})
    with pytest.raises(WeightUpdateError, match="nothing is staged"):
        worker.commit_weights(0, checksums)

    poisoned = {key: value.copy() for key, value in update.items()}
    poisoned[name].flat[0] = np.nan
    sender.send(("whole", poisoned))
    with pytest.raises(WeightUpdateError, match="not finite"):
        worker.receive_weights(0)
    sender.recv()

    sender.send(("whole", update))  # the group is still aligned after the refusal
    worker.receive_weights(1)
    checksums = sender.recv()
    with pytest.raises(WeightUpdateError, match="version 1 is staged"):
        worker.commit_weights(2, checksums)
    assert worker.weights_checksum() == before


def test_a_sender_that_stops_halfway_is_a_sync_error_and_a_new_epoch_works(
    worker: InferenceWorker, sender: Any
) -> None:
    port = sender.recv()
    worker.plan_updates(BUCKET_BYTES)
    join(worker, sender, epoch=0, port=port, timeout=1.0)
    worker.submit([request(0)])
    update = new_weights(worker, 0)
    sender.send(("half", update))
    started = time.monotonic()
    with pytest.raises(SyncError, match="waited for bucket 3 of version 0 from rank 0"):
        worker.receive_weights(0)
    assert time.monotonic() - started < 10
    sender.recv()
    assert len(collect(worker, 4)) == 4, "the old weights keep serving"
    join(worker, sender, epoch=1, port=port)
    sender.send(("whole", update))
    worker.receive_weights(0)
    assert worker.commit_weights(0, sender.recv()).version == 0


@pytest.mark.parametrize(
    ("options", "staging"),
    [(INT8, "device"), (INT8, "host"), (INT8, "none"), (INT4, "device"), (INT4, "none")],
    ids=["int8, device", "int8, host", "int8, none", "int4, device", "int4, none"],
)
def test_what_is_made_of_an_update_does_not_depend_on_the_staging(
    worker: InferenceWorker, sender: Any, model_folder: str, options: dict[str, Any], staging: str
) -> None:
    port = sender.recv()
    worker.plan_updates(BUCKET_BYTES, staging)
    join(worker, sender, epoch=0, port=port)
    update = new_weights(worker, 0)
    sender.send(("whole", update))
    worker.receive_weights(0)
    assert not worker._receiver._buffers, "a bucket is kept beside what was made of it"
    checksums = sender.recv()
    report = worker.commit_weights(0, checksums)
    assert report.checksum == worker.weights_checksum() == combine_checksums(checksums, worker.info().tensors)
    cold = LLM(model_folder, **options)
    cold.update_weights(((name, torch.from_numpy(array)) for name, array in update.items()), version=1)
    for name, tensor in cold.engine.decoder.tensors.items():
        assert torch.equal(tensor, worker._engine.decoder.tensors[name]), name


def test_weights_that_were_half_received_in_place_are_never_used(worker: InferenceWorker, sender: Any) -> None:
    port = sender.recv()
    with pytest.raises(ConfigError, match="staging is 'disk'"):
        worker.plan_updates(BUCKET_BYTES, "disk")
    worker.plan_updates(BUCKET_BYTES, "none")
    join(worker, sender, epoch=0, port=port, timeout=1.0)
    update, before = new_weights(worker, 0), worker.weights_checksum()
    sender.send(("half", update))
    with pytest.raises(SyncError, match="waited for bucket 3 of version 0"):
        worker.receive_weights(0)
    sender.recv()
    assert worker.weights_checksum() != before, "nothing was received in place, so this shows nothing"
    with pytest.raises(WeightUpdateError, match="being rewritten"):
        worker.score(ScoreRequest(sequences=(np.arange(4, dtype=np.int32),)))
    worker.submit([request(0)])
    worker.reset_sync(0)
    worker.resume()  # whoever paused it does not know
    worker.discard_weights(0)
    assert not worker.wait_idle(0.2) and worker.drain(0.0).stats["steps"] == 0

    join(worker, sender, epoch=1, port=port)
    sender.send(("whole", update))
    worker.receive_weights(0)
    checksums = sender.recv()
    report = worker.commit_weights(0, checksums)
    assert report.checksum == worker.weights_checksum() == combine_checksums(checksums, worker.info().tensors)
    assert report.stall_seconds > 0.2, "it stood still since the first byte"
    assert len(collect(worker, 4)) == 4

    sender.send(("whole", new_weights(worker, 1)))
    worker.receive_weights(1)
    with pytest.raises(WeightUpdateError, match="the weights in place are torn"):
        worker.commit_weights(1, sender.recv() | {next(iter(checksums)): 0})
    with pytest.raises(WeightUpdateError, match="being rewritten"):
        worker.score(ScoreRequest(sequences=(np.arange(4, dtype=np.int32),)))


def test_a_sum_that_overflows_is_no_infinity() -> None:
    spec = TensorSpec("w", (2,), "float16")
    high = torch.full((2,), 6e4, dtype=torch.float16)
    assert torch.equal(check_tensor(high, spec, device=torch.device("cpu"), copy=False), high)
    most = torch.full((2,), torch.finfo(torch.float32).max)
    spec = TensorSpec("w", (2,), "float32")
    assert torch.equal(check_tensor(most, spec, device=torch.device("cpu"), copy=False), most)
    for bad in (torch.tensor([1.0, torch.inf]), torch.tensor([torch.inf, -torch.inf]), torch.tensor([torch.nan, 0.0])):
        with pytest.raises(WeightUpdateError, match="not finite"):
            check_tensor(bad, spec, device=torch.device("cpu"), copy=False)
