"""The learner rank as an actor: which calls may run at once.

Collective calls run one after another on a thread of their own, and the caller must make them in the same order on
every rank. `broadcast` runs beside them, which is why the actor wants several threads.

One thread and no lock, because a thread keeps memory: the allocator of the C library frees what a step took for that
thread's next step alone, and OpenMP starts its helpers anew for each.
"""

import functools
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import ray
import torch
import torch.distributed as dist

from learner.memory import return_freed_blocks
from learner.model import attention_tokens
from learner.peak import device_peak
from learner.store import open_store
from learner.trainer import Trainer, join_ranks, pick_device
from learner.weight_sender import WeightSender
from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import WorkerInfo
from olmorl.contract.training import LearnerConfig, RankBatch, ScoreRequest, StepReport
from olmorl.contract.weights import Manifest, SendReport, SyncGroup, TensorSpec

P = ParamSpec("P")
R = TypeVar("R")


def _collective(method: Callable[Concatenate["LearnerWorker", P], R]) -> Callable[Concatenate["LearnerWorker", P], R]:
    """Run on the worker's own thread, behind what was called before."""

    @functools.wraps(method)
    def run(self: "LearnerWorker", *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.submit(method, self, *args, **kwargs).result()

    return run


class LearnerWorker:
    def __init__(self, config: LearnerConfig, *, rank: int, world_size: int) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._device = pick_device(config.device, rank=rank)
        if self._device.type == "cpu" and config.activation_checkpointing:  # memory is wanted more than time
            return_freed_blocks()
        self._rendezvous: dist.TCPStore | None = None
        self._trainer: Trainer | None = None
        self._sender: WeightSender | None = None
        self._thread = self._new_thread()

    def host_rendezvous(self) -> tuple[str, int]:
        """On rank 0: open the store where all ranks meet; returns what the others need for `start`."""
        host = _own_address()
        self._rendezvous = open_store(host)
        return host, self._rendezvous.port

    @_collective
    def start(self, host: str, port: int) -> None:
        """Join the other ranks, load the model and shard it."""
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

    @_collective
    def train_step(self, batch: RankBatch) -> StepReport:
        return self._started()[0].train_step(batch)

    @_collective
    def score(self, request: ScoreRequest) -> list[np.ndarray]:
        return self._started()[0].score(request)

    def plan_updates(self, tensors: Sequence[TensorSpec], bucket_bytes: int, shared: bool = False) -> Manifest:
        return self._started()[1].plan(tensors, bucket_bytes=bucket_bytes, shared=shared)

    def host_store(self) -> tuple[str, int]:
        """On rank 0: open the store where sender and engines meet."""
        host = _own_address()
        return host, self._started()[1].host_store(host)

    def join_sync_group(self, group: SyncGroup) -> None:
        self._started()[1].join(group)

    @_collective
    def gather_update(self, version: int) -> None:
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

    @_collective
    def save(self, path: str) -> None:
        """Returns when the state is copied; it is on disk when `finish_save` returns."""
        self._started()[0].save(path)

    def finish_save(self) -> None:
        """Does not wait for a collective call, nor make one wait."""
        self._started()[0].finish_save()

    @_collective
    def load(self, path: str) -> int:
        """Returns the policy version of the checkpoint."""
        return self._started()[0].load(path)

    @_collective
    def export(self, path: str) -> None:
        self._started()[0].export(path)

    def shutdown(self) -> None:
        """Leave everything, the thread too: what DTensor keeps for a thread holds the process group, and a fork of a
        process with such a thread takes the group apart in the child, which may wait there for ever."""
        self._leave()
        self._thread.shutdown()
        self._thread = self._new_thread()

    @_collective
    def _leave(self) -> None:
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

    def _new_thread(self) -> ThreadPoolExecutor:
        """It starts with its first call."""
        return ThreadPoolExecutor(1, "collective", self._choose_device)

    def _choose_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a choice that each thread makes anew


def _own_address() -> str:
    """Where other nodes of the cluster reach this process; without a cluster there are no other nodes."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
