"""The learner rank as an actor: which calls may run at once.

Collective calls are one at a time, and the caller must make them in the same order on every rank. `broadcast` runs
beside them, which is why the actor wants several threads.
"""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist

from learner.model import attention_tokens
from learner.peak import device_peak
from learner.store import open_store
from learner.trainer import Trainer, join_ranks, pick_device
from learner.weight_sender import WeightSender
from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import WorkerInfo
from olmorl.contract.training import LearnerConfig, RankBatch, ScoreRequest, StepReport
from olmorl.contract.weights import Manifest, SendReport, SyncGroup, TensorSpec


class LearnerWorker:
    def __init__(self, config: LearnerConfig, *, rank: int, world_size: int) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._device = pick_device(config.device, rank=rank)
        self._rendezvous: dist.TCPStore | None = None
        self._trainer: Trainer | None = None
        self._sender: WeightSender | None = None
        self._collective = threading.Lock()

    def host_rendezvous(self) -> tuple[str, int]:
        """On rank 0: open the store where all ranks meet; returns what the others need for `start`."""
        host = _own_address()
        self._rendezvous = open_store(host)
        return host, self._rendezvous.port

    def start(self, host: str, port: int) -> None:
        """Join the other ranks, load the model and shard it."""
        with self._one_at_a_time():
            if self._device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(self._config.gpu_share, self._device)
            store = self._rendezvous or dist.TCPStore(host, port, is_master=False)
            join_ranks(store, rank=self._rank, world_size=self._world_size, device=self._device)
            self._trainer = Trainer(self._config, device=self._device)
            self._sender = WeightSender(self._trainer.policy, rank=self._rank, device=self._device)

    def info(self) -> WorkerInfo:
        peak = device_peak(self._device)
        return WorkerInfo(
            name=f"learner-{self._rank}",
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(self._device),
            num_parameters=self._started()[0].policy.num_parameters,
            peak_flops=peak.flops,
            peak_bandwidth=peak.bandwidth,
            peak_source=peak.source,
            tensors=(),
            attention_tokens=attention_tokens(self._started()[0].policy),
        )

    def train_step(self, batch: RankBatch) -> StepReport:
        with self._one_at_a_time():
            return self._started()[0].train_step(batch)

    def score(self, request: ScoreRequest) -> list[np.ndarray]:
        with self._one_at_a_time():
            return self._started()[0].score(request)

    def plan_updates(self, tensors: Sequence[TensorSpec], bucket_bytes: int, shared: bool = False) -> Manifest:
        return self._started()[1].plan(tensors, bucket_bytes=bucket_bytes, shared=shared)

    def host_store(self) -> tuple[str, int]:
        """On rank 0: open the store where sender and engines meet."""
        host = _own_address()
        return host, self._started()[1].host_store(host)

    def join_sync_group(self, group: SyncGroup) -> None:
        self._started()[1].join(group)

    def gather_update(self, version: int) -> None:
        with self._one_at_a_time():
            trainer, sender = self._started()
            if version != trainer.version:
                raise WorkerError(f"asked to gather version {version}, but the learner holds {trainer.version}")
            sender.gather(version)

    def broadcast(self, version: int) -> SendReport:
        """On rank 0; does not wait for a collective call, nor make one wait."""
        return self._started()[1].broadcast(version)

    def keep_weights(self, version: int, path: str) -> None:
        """On rank 0: write what was gathered last to a file. Makes no collective call wait."""
        self._started()[1].keep(version, Path(path))

    def reset_sync(self, epoch: int) -> None:
        """On rank 0: leave the group of `epoch`, interrupting a broadcast."""
        self._started()[1].reset(epoch)

    def ping(self) -> None:
        """Answers while the process lives."""

    def save(self, path: str) -> None:
        """Returns when the state is copied; it is on disk when `finish_save` returns."""
        with self._one_at_a_time():
            self._started()[0].save(path)

    def finish_save(self) -> None:
        """Does not wait for a collective call, nor make one wait."""
        self._started()[0].finish_save()

    def load(self, path: str) -> int:
        """Returns the policy version of the checkpoint."""
        with self._one_at_a_time():
            return self._started()[0].load(path)

    def export(self, path: str) -> None:
        with self._one_at_a_time():
            self._started()[0].export(path)

    def shutdown(self) -> None:
        with self._one_at_a_time():
            if self._sender is not None:
                self._sender.leave()
            if self._trainer is not None:
                self._trainer.close()
            self._trainer = self._sender = None
            if dist.is_initialized():
                dist.destroy_process_group()

    def _started(self) -> tuple[Trainer, WeightSender]:
        if self._trainer is None or self._sender is None:
            raise WorkerError(f"learner rank {self._rank} was not started")
        return self._trainer, self._sender

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        with self._collective:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a choice that each thread makes anew
            yield


def _own_address() -> str:
    """Where other nodes of the cluster reach this process; without a cluster there are no other nodes."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
