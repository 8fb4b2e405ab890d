"""Send the weights of a version to the engines while the learner trains the next one.

In two parts, so that nothing that trains waits for the wire: `gather`, on all ranks between two steps, copies the
shards into packed buckets in the wire's dtype; `broadcast`, on rank 0 and in a thread of its own, sends those copies.
The copy costs the size of the model once, in the wire's dtype, on rank 0; in return the optimizer may change the
shards at once and no gather ever meets a send.

The broadcast group stands beside the default group, under a store of its own. A new membership is a new epoch, that is
a new prefix in the store; after a failure the old group is left and the sender can join a new one.
"""

import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.model import DTYPES, PolicyModel, full_tensor
from learner.store import open_store
from olmorl.contract.errors import ModelError, SyncError
from olmorl.contract.weights import (
    Manifest,
    SendReport,
    SyncGroup,
    TensorSpec,
    plan_buckets,
    tensor_checksum,
)

COMPLETION_POLL_SECONDS = 0.0005  # gloo's own wait cannot be interrupted


class WeightSender:
    def __init__(self, policy: PolicyModel, *, rank: int, device: torch.device) -> None:
        self._policy = policy
        self._rank = rank
        self._device = device
        self._manifest: Manifest | None = None
        self._buckets: list[Tensor] = []  # uint8, on rank 0 alone
        self._version = -1  # of what lies in the buckets
        self._buckets_lock = threading.Lock()  # a gather must not write what a broadcast still reads
        self._store: dist.TCPStore | None = None
        self._group: Any = None  # a bare backend, whose classes carry no types
        self._group_name = "no group"
        self._epoch = -1  # of the newest call of join
        self._timeout_seconds = 0.0
        self._interrupt = threading.Event()  # one for each group

    def plan(self, tensors: Iterable[TensorSpec], *, bucket_bytes: int) -> Manifest:
        """Cut the engine's tensors into buckets. They must be the learner's parameters: all, and in shape."""
        tensors = tuple(tensors)
        _check_agreement(tensors, self._policy)
        self._manifest = plan_buckets(tensors, bucket_bytes=bucket_bytes)
        if self._rank == 0:
            sizes = [bucket.num_bytes for bucket in self._manifest.buckets]
            self._buckets = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
        return self._manifest

    def gather(self, version: int) -> None:
        """Copy the weights, which must be those of `version`, into the buckets. Collective over the learner ranks."""
        if self._manifest is None:
            raise SyncError("gather_update was called before plan_updates")
        with self._buckets_lock:
            parameters = self._policy.hugging_face_parameters()
            for bucket in self._manifest.buckets:
                for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                    whole = full_tensor(parameters[spec.name], dtype=DTYPES[spec.dtype])
                    if self._rank == 0:
                        place = self._buckets[bucket.index][offset : offset + spec.num_bytes]
                        place.view(whole.dtype).copy_(whole.flatten())
            self._version = version

    def host_store(self, host: str) -> int:
        """Open the store that the members of every epoch meet in; returns its port."""
        if self._store is None:
            self._store = open_store(host)
        return self._store.port

    def join(self, group: SyncGroup) -> None:
        """Enter the group as its sender. Returns when all members are there; leaves any older group."""
        self.leave()
        if self._store is None:
            raise SyncError("join_sync_group was called before host_store")
        assert group.rank == 0, "the learner is rank 0 of a sync group"
        self._epoch = group.epoch
        timeout = timedelta(seconds=group.timeout_seconds)
        store = dist.PrefixStore(f"sync/{group.epoch}", self._store)
        store.set_timeout(timeout)
        name = f"sync group of epoch {group.epoch} with {group.size - 1} engines"
        try:
            joined = _make_group(store, group, timeout)
        except RuntimeError as error:
            raise SyncError(f"the {name} did not form within {group.timeout_seconds:g} s: {error}") from error
        if self._epoch != group.epoch:
            raise SyncError(f"the {name} was given up while it formed")
        self._group, self._group_name, self._timeout_seconds = joined, name, group.timeout_seconds
        self._interrupt = threading.Event()

    def leave(self) -> None:
        self._interrupt.set()
        self._group = None
        self._group_name = "no group"

    def reset(self, epoch: int) -> None:
        """Leave the group, unless it is newer than `epoch`; a broadcast that still waits is interrupted."""
        if self._epoch <= epoch:
            self._epoch = -1
            self.leave()

    def broadcast(self, version: int) -> SendReport:
        """Send every bucket, in order, within the group's timeout for all of them together."""
        with self._buckets_lock:
            if self._group is None or self._manifest is None:
                raise SyncError(f"cannot broadcast version {version}: the learner is in no sync group")
            if version != self._version:
                raise SyncError(f"cannot broadcast version {version}: version {self._version} was gathered last")
            began = time.perf_counter()
            checksums: dict[str, int] = {}
            for bucket, data in zip(self._manifest.buckets, list(self._buckets), strict=True):
                self._send(data, bucket.index, version=version, deadline=began + self._timeout_seconds)
                staged = data.cpu().numpy()
                for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                    checksums[spec.name] = tensor_checksum(staged[offset : offset + spec.num_bytes])
            return SendReport(
                version=version,
                checksums=checksums,
                num_bytes=self._manifest.num_bytes,
                seconds=time.perf_counter() - began,
            )

    def _send(self, data: Tensor, index: int, *, version: int, deadline: float) -> None:
        group, name, interrupt = self._group, self._group_name, self._interrupt
        if group is None:
            raise SyncError(f"broadcasting version {version} was interrupted by a reset")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(0.001, deadline - time.perf_counter()))
        try:
            work = group.broadcast([data], options)
            while not work.is_completed():
                if interrupt.wait(COMPLETION_POLL_SECONDS):
                    # The transport may read this memory for a while yet: the next gather must not write it.
                    self._buckets[index] = data.clone()
                    raise RuntimeError("interrupted by a reset")
            work.wait()
            if data.is_cuda:
                torch.cuda.current_stream().synchronize()  # NCCL's wait orders streams, not this thread
        except RuntimeError as error:
            if self._group is group:
                self.leave()
            raise SyncError(f"broadcasting version {version} to the {name} failed: {error}") from error


def _make_group(store: dist.Store, group: SyncGroup, timeout: timedelta) -> Any:
    if group.transport == "gloo":
        return dist.ProcessGroupGloo(store, group.rank, group.size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, group.rank, group.size, options)


def _check_agreement(tensors: tuple[TensorSpec, ...], policy: PolicyModel) -> None:
    ours = {name: tuple(parameter.shape) for name, parameter in policy.hugging_face_parameters().items()}
    theirs = {spec.name: tuple(spec.shape) for spec in tensors}
    complaints = [f"the learner has no {name}" for name in theirs if name not in ours]
    complaints += [f"the engine has no {name}" for name in ours if name not in theirs]
    complaints += [
        f"{name} is {ours[name]} in the learner, {theirs[name]} in the engine"
        for name in theirs
        if name in ours and ours[name] != theirs[name]
    ]
    complaints += [f"{spec.name} has dtype {spec.dtype}" for spec in tensors if spec.dtype not in DTYPES]
    if complaints:
        shown = "; ".join(complaints[:5]) + (f"; and {len(complaints) - 5} more" if len(complaints) > 5 else "")
        raise ModelError(f"learner and engine disagree about the model: {shown}")
