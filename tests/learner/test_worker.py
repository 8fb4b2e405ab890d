"""Learner workers in processes of their own: one rank and two do the same, and only plain errors leave them."""

import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from learner.pack import pack
from learner.trainer import Trainer
from olmorl.contract.errors import ModelError, WorkerError
from olmorl.contract.training import LearnerConfig, ScoreRequest, StepReport, TrainSample
from olmorl.contract.weights import SyncGroup, TensorSpec, tensor_checksum
from tests.learner.conftest import make_samples

REQUEST = ScoreRequest(sequences=tuple(np.arange(3, 3 + n, dtype=np.int32) for n in (2, 9, 17)))


def train(ranks: Any, samples: list[TrainSample], *, version: int) -> list[Any]:
    """Micro-batches so small that the ranks pass several."""
    batches = pack(samples, version=version, num_ranks=len(ranks.workers), tokens_per_micro_batch=37)
    return ranks.call("train_step", each=batches)


def train_alone(trainer: Trainer, samples: list[TrainSample], *, version: int) -> StepReport:
    return trainer.train_step(pack(samples, version=version, num_ranks=1, tokens_per_micro_batch=64)[0])


def broadcast_once(ranks: Any, export: Path, join_as_engine: Callable[[SyncGroup], Any]) -> dict[str, np.ndarray]:
    """What an engine receives when it asks for the tensors of `export`."""
    weights = load_file(export / "model.safetensors")
    specs = [TensorSpec(name, weight.shape, "float32") for name, weight in weights.items()]
    manifest, _ = ranks.call("plan_updates", specs, 5000)
    host, port = ranks.workers[0].host_store()
    group = SyncGroup(epoch=0, host=host, port=port, rank=0, size=2, transport="gloo", timeout_seconds=30)
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(join_as_engine, replace(group, rank=1))
        ranks.workers[0].join_sync_group(group)
        engine = joining.result()
        ranks.call("gather_update", 3)
        sending = threads.submit(ranks.workers[0].broadcast, 3)
        ranks.call("score", REQUEST)  # gathers shards on all ranks before the engine takes anything in
        received = engine.receive(manifest)
        report = sending.result()
    assert report.checksums == {name: tensor_checksum(data) for name, data in received.items()}
    return received


def assert_equal_weights(one: Path, two: Path) -> None:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6, err_msg=name)


def everything(ranks: Any, samples: list[TrainSample], *, version: int) -> list[Any]:
    """A step with two mini-batches, on ranks in processes of their own or on a trainer in this one."""
    alone = isinstance(ranks, Trainer)
    batches = pack(
        samples,
        version=version,
        num_ranks=1 if alone else len(ranks.workers),
        tokens_per_micro_batch=37,
        num_mini_batches=2,
        attention_tokens=30.0,
    )
    return [ranks.train_step(batches[0])] if alone else ranks.call("train_step", each=batches)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("resumed_by", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_four_ranks_in_two_replicas_train_as_one_and_resume_as_fewer(
    start_ranks: Callable, config: LearnerConfig, samples: list[TrainSample], tmp_path: Path, resumed_by: int
) -> None:
    """With mini-batches, epochs and a reference model. On two ranks their checkpoint and the single one's meet."""
    config = replace(config, objective="gspo", importance_band=(0.2, 3.0), kl_beta=0.3, epochs=2)
    one, four = Trainer(config, device=torch.device("cpu")), start_ranks(replace(config, shard_size=2), 4)
    for version in range(2):
        (single,) = everything(one, samples, version=version)
        reports = everything(four, samples, version=version)
        assert all(report.metrics == reports[0].metrics for report in reports)
        for name, value in single.metrics.items():
            assert reports[0].metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-7), name
    four.call("save", str(tmp_path / "by_four"))
    one.save(str(tmp_path / "by_one"))
    everything(four, samples, version=2)
    everything(one, samples, version=2)
    four.call("finish_save")
    one.finish_save()
    four.call("export", str(tmp_path / "four"))
    one.export(str(tmp_path / "one"))
    assert_equal_weights(tmp_path / "one", tmp_path / "four")

    if resumed_by == 1:
        assert one.load(str(tmp_path / "by_four")) == 2
        everything(one, samples, version=2)
        one.export(str(tmp_path / "resumed"))
        assert_equal_weights(tmp_path / "one", tmp_path / "resumed")
        return
    two = start_ranks(config, 2)
    for checkpoint in ("by_four", "by_one"):
        assert two.call("load", str(tmp_path / checkpoint)) == [2, 2]
        everything(two, samples, version=2)
        two.call("export", str(tmp_path / "resumed"))
        assert_equal_weights(tmp_path / "one", tmp_path / "resumed")


@pytest.mark.usefixtures("one_rank")
def test_two_ranks_train_as_one_and_resume_as_one(
    start_ranks: Callable,
    config: LearnerConfig,
    samples: list[TrainSample],
    model_folder: Callable[[str], str],
    join_as_engine: Callable[[SyncGroup], Any],
    tmp_path: Path,
) -> None:
    config = replace(config, model=model_folder("llama_tied"))  # its 23 rows of embedding do not halve
    one, two = Trainer(config, device=torch.device("cpu")), start_ranks(config, 2)
    for version, batch in enumerate((samples, samples[:1], samples[5:])):  # the second leaves a rank with nothing
        single = train_alone(one, batch, version=version)
        first, second = train(two, batch, version=version)
        assert first.metrics == second.metrics
        for name, value in single.metrics.items():
            assert first.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        assert first.num_tokens + second.num_tokens >= single.num_tokens  # a prompt may be on both
    two.call("export", str(tmp_path / "two"))
    one.export(str(tmp_path / "one"))
    assert_equal_weights(tmp_path / "one", tmp_path / "two")

    scores = two.call("score", REQUEST)
    for mine, other, single in zip(*scores, one.score(REQUEST), strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, single, atol=1e-5)

    received = broadcast_once(two, tmp_path / "two", join_as_engine)
    for name, weight in load_file(tmp_path / "two" / "model.safetensors").items():
        np.testing.assert_array_equal(received[name], weight.view(np.uint8).ravel(), err_msg=name)

    two.call("save", str(tmp_path / "checkpoint"))
    train(two, samples, version=3)  # changes the weights while they may still be on their way to disk
    two.call("finish_save")
    assert one.load(str(tmp_path / "checkpoint")) == 3
    train_alone(one, samples, version=3)
    two.call("export", str(tmp_path / "two"))
    one.export(str(tmp_path / "one"))
    assert_equal_weights(tmp_path / "one", tmp_path / "two")

    broken = [replace(samples[0], advantage=math.nan), *samples[1:]]
    assert not any(report.stepped for report in train(two, broken, version=4)), "it is on one rank alone"
    assert all(report.stepped for report in train(two, samples, version=5))


def test_a_worker_says_who_it_is_and_refuses_in_plain_errors(
    start_ranks: Callable, config: LearnerConfig, samples: list[TrainSample]
) -> None:
    ranks = start_ranks(config, 1)
    (info,) = ranks.call("info")
    assert info.name == "learner-0" and info.num_parameters > 0
    assert 1e8 < info.peak_flops < 1e15 and 1e8 < info.peak_bandwidth < 1e13
    with pytest.raises(WorkerError, match="gather version 5, but the learner holds 0"):
        ranks.call("gather_update", 5)
    with pytest.raises(ModelError, match="the engine has no"):
        ranks.call("plan_updates", [], 1000)
    ranks.call("shutdown")
    with pytest.raises(WorkerError, match="not started"):
        train(ranks, samples, version=0)


THEN_FORK = """
import gc, subprocess, sys
from learner.worker import LearnerWorker
from olmorl.contract.training import LearnerConfig

worker = LearnerWorker(LearnerConfig(model=sys.argv[1], threads=1), rank=0, world_size=1)
worker.start(*worker.host_rendezvous())
threads = worker._thread  # as long as somebody holds it, what is left of it lives
worker.shutdown()
del worker
gc.collect()
subprocess.run(["true"], check=True, preexec_fn=int)  # a real fork, as Ray starts its servers
"""


def test_a_process_forks_after_its_worker_was_shut_down(model_folder: Callable[[str], str]) -> None:
    """A thread that stays has the process group in what DTensor caches: its end in the child then never comes."""
    subprocess.run([sys.executable, "-c", THEN_FORK, model_folder("olmo2")], check=True, timeout=60)


def test_ranks_run_ahead_of_a_send_and_never_into_it(
    start_ranks: Callable,
    config: LearnerConfig,
    samples: list[TrainSample],
    join_as_engine: Callable[[SyncGroup], Any],
    tmp_path: Path,
) -> None:
    """An engine that reads late: both ranks train on, rank 1 is in the next gather already, and what arrives is whole.

    The gather is on the ranks' group, the send on the engines', and only rank 0 is in both.
    """
    two = start_ranks(config, 2)
    two.call("export", str(tmp_path / "sent"))
    weights = load_file(tmp_path / "sent" / "model.safetensors")
    specs = [TensorSpec(name, weight.shape, "float32") for name, weight in weights.items()]
    manifest, _ = two.call("plan_updates", specs, 5000)
    host, port = two.workers[0].host_store()
    group = SyncGroup(epoch=0, host=host, port=port, rank=0, size=2, transport="gloo", timeout_seconds=60)
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(join_as_engine, replace(group, rank=1))
        two.workers[0].join_sync_group(group)
        engine = joining.result()
        two.call("gather_update", 0)
        sending = threads.submit(two.workers[0].broadcast, 0)
        train(two, samples, version=0)
        gathering = threads.submit(two.call, "gather_update", 1)
        assert not sending.done() and not gathering.done(), "the engine has not read yet"
        received = engine.receive(manifest)
        assert sending.result().checksums == {name: tensor_checksum(data) for name, data in received.items()}
        gathering.result()
        receiving = threads.submit(engine.receive, manifest)
        second = two.workers[0].broadcast(1).checksums
        assert second == {name: tensor_checksum(data) for name, data in receiving.result().items()}
    for name, weight in weights.items():
        np.testing.assert_array_equal(received[name], weight.view(np.uint8).ravel(), err_msg=name)
    assert all(second[name] != tensor_checksum(received[name]) for name in received), "the step changed nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak counts from the start of the process")
def test_whoever_calls_a_step_it_takes_the_memory_of_the_last_one(start_ranks: Callable, config: LearnerConfig) -> None:
    ranks = start_ranks(replace(config, logprob_chunk_tokens=1024), 1)
    samples = make_samples(1000, seed=5)
    with ExitStack() as stack:
        callers = [
            stack.enter_context(ThreadPoolExecutor(1)) for _ in range(6)
        ]  # all there all the time, as in an actor
        peaks = []
        for version, caller in enumerate(callers):
            (batch,) = pack(samples, version=version, num_ranks=1, tokens_per_micro_batch=100_000)
            peaks.append(caller.submit(ranks.workers[0].train_step, batch).result().peak_bytes)
    assert peaks[-1] < 1.2 * peaks[1], peaks
