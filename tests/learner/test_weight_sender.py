"""What engines receive is what the learner held, whatever is trained meanwhile."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.pack import pack
from learner.sender_link import GroupLink
from learner.trainer import Trainer
from learner.weight_sender import WeightSender
from olmorl.contract.errors import ModelError, SyncError
from olmorl.contract.training import LearnerConfig, TrainSample
from olmorl.contract.weights import SyncGroup, TensorSpec, tensor_checksum

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def trainer(config: LearnerConfig) -> Trainer:
    return Trainer(config, device=CPU)


def specs_of(trainer: Trainer, dtype: str = "float32") -> list[TensorSpec]:
    parameters = trainer.policy.hugging_face_parameters()
    return [TensorSpec(name, tuple(p.shape), dtype) for name, p in parameters.items()]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor().clone() for n, p in trainer.policy.hugging_face_parameters().items()}


@pytest.fixture
def connect(join_as_engine: Callable[[SyncGroup], Any]) -> Callable[..., list[Any]]:
    """Join the sender and some engines to one group; returns the engines."""

    def join_all(
        sender: WeightSender, threads: ThreadPoolExecutor, *, epoch: int = 0, engines: int = 1, timeout: float = 20.0
    ) -> list[Any]:
        sender_group = group_of(sender, epoch=epoch, size=engines + 1, timeout=timeout)
        joining = [threads.submit(join_as_engine, replace(sender_group, rank=1 + i)) for i in range(engines)]
        sender.join(sender_group)
        return [join.result() for join in joining]

    return join_all


def group_of(sender: WeightSender, *, epoch: int = 0, size: int = 2, timeout: float = 20.0) -> SyncGroup:
    return SyncGroup(
        epoch=epoch,
        host="127.0.0.1",
        port=sender.host_store("127.0.0.1"),
        rank=0,
        size=size,
        transport="gloo",
        timeout_seconds=timeout,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 20])
def test_engines_receive_the_weights(trainer: Trainer, connect: Callable, dtype: str, bucket_bytes: int) -> None:
    sender = WeightSender(trainer.policy, rank=0, device=CPU)
    manifest = sender.plan(specs_of(trainer, dtype), bucket_bytes=bucket_bytes)
    with ThreadPoolExecutor() as threads:
        receivers = connect(sender, threads, engines=2)
        sender.gather(0)
        receiving = [threads.submit(receiver.receive, manifest) for receiver in receivers]
        report = sender.broadcast(0)
        for received in (future.result() for future in receiving):
            assert received.keys() == weights(trainer).keys()
            for name, weight in weights(trainer).items():
                sent = weight.to(getattr(torch, dtype)).contiguous().view(torch.uint8).flatten().numpy()
                np.testing.assert_array_equal(received[name], sent)
                assert report.checksums[name] == tensor_checksum(received[name])
    assert report.version == 0 and report.num_bytes == manifest.num_bytes


def test_a_training_step_does_not_touch_what_is_sent(
    trainer: Trainer, connect: Callable, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs whole between the first bucket and the second."""
    sender = WeightSender(trainer.policy, rank=0, device=CPU)
    manifest = sender.plan(specs_of(trainer), bucket_bytes=5000)
    first_sent, trained = threading.Event(), threading.Event()
    send = GroupLink.send

    def send_and_wait(link: GroupLink, index: int, data: torch.Tensor, **options: Any) -> None:
        send(link, index, data, **options)
        first_sent.set()
        assert trained.wait(60)

    monkeypatch.setattr(GroupLink, "send", send_and_wait)
    with ThreadPoolExecutor() as threads:
        (receiver,) = connect(sender, threads)
        before = weights(trainer)
        sender.gather(0)
        receiving = threads.submit(receiver.receive, manifest)
        sending = threads.submit(sender.broadcast, 0)
        assert first_sent.wait(60)
        (batch,) = pack(samples, version=0, num_ranks=1, tokens_per_micro_batch=64)
        trainer.train_step(batch)
        trained.set()
        sending.result()
        received = receiving.result()
    changed = weights(trainer)
    for name, weight in before.items():
        np.testing.assert_array_equal(received[name], weight.view(torch.uint8).flatten().numpy())
        assert not torch.equal(weight, changed[name])


def test_a_gather_waits_for_the_broadcast_that_still_reads(trainer: Trainer, connect: Callable) -> None:
    sender = WeightSender(trainer.policy, rank=0, device=CPU)
    manifest = sender.plan(specs_of(trainer), bucket_bytes=1 << 20)
    with ThreadPoolExecutor() as threads:
        (receiver,) = connect(sender, threads)
        sender.gather(0)
        with sender._buckets_lock:
            gathering: Future = threads.submit(sender.gather, 1)
            with pytest.raises(TimeoutError):
                gathering.result(timeout=0.2)
        gathering.result()
        receiving = threads.submit(receiver.receive, manifest)
        with pytest.raises(SyncError, match="version 1 was gathered last"):
            sender.broadcast(0)
        sender.broadcast(1)
        receiving.result()


def test_a_late_engine_fails_the_broadcast_and_a_new_epoch_works(trainer: Trainer, connect: Callable) -> None:
    sender = WeightSender(trainer.policy, rank=0, device=CPU)
    manifest = sender.plan(specs_of(trainer), bucket_bytes=1 << 20)
    # more bytes than the sockets buffer, so that the sender must notice that nobody reads
    sender._buckets = [torch.zeros(64 << 20, dtype=torch.uint8) for _ in manifest.buckets]
    with ThreadPoolExecutor() as threads:
        stuck = connect(sender, threads, timeout=1.0)
        sender.gather(0)
        with pytest.raises(SyncError, match="version 0 to the sync group of epoch 0 with 1 engines failed"):
            sender.broadcast(0)
        with pytest.raises(SyncError, match="in no sync group"):
            sender.broadcast(0)
        manifest = sender.plan(specs_of(trainer), bucket_bytes=1 << 20)
        (receiver,) = connect(sender, threads, epoch=1)
        sender.gather(0)
        receiving = threads.submit(receiver.receive, manifest)
        sender.broadcast(0)
        assert receiving.result().keys() == weights(trainer).keys()
    del stuck


def test_an_engine_that_never_joins(trainer: Trainer) -> None:
    sender = WeightSender(trainer.policy, rank=0, device=CPU)
    with pytest.raises(SyncError, match="epoch 0 with 1 engines did not form within 1 s"):
        sender.join(group_of(sender, timeout=1.0))


def test_calls_in_the_wrong_order(trainer: Trainer) -> None:
    sender = WeightSender(trainer.policy, rank=0, device=CPU)
    with pytest.raises(SyncError, match="before plan_updates"):
        sender.gather(0)
    with pytest.raises(SyncError, match="in no sync group"):
        sender.broadcast(0)


def test_disagreement_about_the_model_is_told(trainer: Trainer) -> None:
    sender = WeightSender(trainer.policy, rank=0, device=CPU)
    specs = specs_of(trainer)
    with pytest.raises(ModelError, match=r"the learner has no model\.extra\.weight"):
        sender.plan([*specs, TensorSpec("model.extra.weight", (3,), "float32")], bucket_bytes=100)
    with pytest.raises(ModelError, match=r"the engine has no lm_head\.weight"):
        sender.plan([s for s in specs if s.name != "lm_head.weight"], bucket_bytes=100)
    wrong = [replace(s, shape=(24, 32)) if s.name == "lm_head.weight" else s for s in specs]
    with pytest.raises(ModelError, match=r"lm_head\.weight is \(23, 32\) in the learner, \(24, 32\) in the engine"):
        sender.plan(wrong, bucket_bytes=100)
    with pytest.raises(ModelError, match="dtype float8"):
        sender.plan([replace(s, dtype="float8") for s in specs], bucket_bytes=100)


def test_a_tied_head_travels_as_the_embedding(config: LearnerConfig, model_folder: Callable[[str], str]) -> None:
    trainer = Trainer(replace(config, model=model_folder("llama_tied")), device=CPU)
    assert "lm_head.weight" not in {spec.name for spec in specs_of(trainer)}
    WeightSender(trainer.policy, rank=0, device=CPU).plan(specs_of(trainer), bucket_bytes=1 << 20)
