"""Send the weights of a version to the engines while the learner trains the next one.

In two parts, so that nothing that trains waits for the wire: `gather`, on all ranks between two steps, copies the
shards into packed buckets in the wire's dtype; `broadcast`, on rank 0 and in a thread of its own, sends those copies.
The copy costs the size of the model once, in the wire's dtype, on rank 0; in return the optimizer may change the
shards at once and no gather ever meets a send.

The link to the engines (`sender_link.py`) stands beside the default group, under a store of its own. A new membership
is a new epoch, that is a new prefix in the store; after a failure the old link is left and the sender can join anew.

Where engines map the buckets (`ipc`) they read them until they have committed: who calls `gather` waits for that.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from learner.kept_weights import write_weights
from learner.model import DTYPES, PolicyModel, full_tensor
from learner.sender_link import GroupLink, SenderLink, SharedLink
from learner.shared_bucket import SharedBucket
from learner.store import open_store
from olmorl.contract.errors import ModelError, SyncError
from olmorl.contract.weights import (
    Manifest,
    SendReport,
    SyncGroup,
    TensorSpec,
    bucket_checksums,
    plan_buckets,
)


class WeightSender:
    def __init__(self, policy: PolicyModel, *, rank: int, device: torch.device) -> None:
        self._policy = policy
        self._rank = rank
        self._device = device
        self._manifest: Manifest | None = None
        self._buckets: list[Tensor] = []  # uint8, on rank 0 alone
        self._shared: list[SharedBucket] = []  # what the buckets lie in, where engines map them
        self._version = -1  # of what lies in the buckets
        self._buckets_lock = threading.Lock()  # a gather must not write what a broadcast still reads
        self._store: dist.TCPStore | None = None
        self._link: SenderLink | None = None
        self._group_name = "no group"
        self._epoch = -1  # of the newest call of join
        self._timeout_seconds = 0.0
        self._interrupt = threading.Event()  # one for each group

    def plan(self, tensors: Iterable[TensorSpec], *, bucket_bytes: int, shared: bool = False) -> Manifest:
        """Cut the engine's tensors into buckets. They must be the learner's parameters: all, and in shape.

        `shared`: in memory that engines of this machine can map, for transport `ipc`.
        """
        tensors = tuple(tensors)
        _check_agreement(tensors, self._policy)
        self._manifest = plan_buckets(tensors, bucket_bytes=bucket_bytes)
        if self._rank == 0:
            sizes = [bucket.num_bytes for bucket in self._manifest.buckets]
            if shared:
                self._shared = [SharedBucket(size, device=self._device) for size in sizes]
                self._buckets = [bucket.data for bucket in self._shared]
            else:
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

    def keep(self, version: int, path: Path) -> None:
        """Write the buckets, which must hold `version`, to a safetensors file. On rank 0 alone."""
        with self._buckets_lock:
            if self._manifest is None or version != self._version:
                raise SyncError(f"cannot keep version {version}: version {self._version} was gathered last")
            write_weights(path, self._gathered(self._manifest))

    def _gathered(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        for bucket in manifest.buckets:
            for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                data = self._buckets[bucket.index][offset : offset + spec.num_bytes]
                yield spec.name, data.view(DTYPES[spec.dtype]).view(spec.shape)

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
        interrupt = self._interrupt = threading.Event()
        timeout = timedelta(seconds=group.timeout_seconds)
        store = dist.PrefixStore(f"sync/{group.epoch}", self._store)
        store.set_timeout(timeout)
        name = f"sync group of epoch {group.epoch} with {group.size - 1} engines"
        try:
            link: SenderLink
            if group.transport == "ipc":
                link = SharedLink(store, group, self._shared, interrupt=interrupt)
            else:
                link = GroupLink(store, group)
        except RuntimeError as error:
            raise SyncError(f"the {name} did not form within {group.timeout_seconds:g} s: {error}") from error
        if self._epoch != group.epoch:
            raise SyncError(f"the {name} was given up while it formed")
        self._link, self._group_name, self._timeout_seconds = link, name, group.timeout_seconds

    def leave(self) -> None:
        self._interrupt.set()
        self._link = None
        self._group_name = "no group"

    def reset(self, epoch: int) -> None:
        """Leave the group, unless it is newer than `epoch`; a broadcast that still waits is interrupted."""
        if self._epoch <= epoch:
            self._epoch = -1
            self.leave()

    def broadcast(self, version: int) -> SendReport:
        """Send every bucket, in order, within the group's timeout for all of them together."""
        with self._buckets_lock:
            link, interrupt = self._link, self._interrupt
            if link is None or self._manifest is None:
                raise SyncError(f"cannot broadcast version {version}: the learner is in no sync group")
            if version != self._version:
                raise SyncError(f"cannot broadcast version {version}: version {self._version} was gathered last")
            began = time.perf_counter()
            deadline = began + self._timeout_seconds
            checksums: dict[str, int] = {}
            index = 0
            try:
                for index, bucket in enumerate(self._manifest.buckets):
                    data = self._buckets[index]
                    link.send(index, data, version=version, deadline=deadline, interrupt=interrupt)
                    checksums |= bucket_checksums(bucket, data.cpu().numpy())
                link.finish(version, deadline=deadline, interrupt=interrupt)
            except RuntimeError as error:
                if isinstance(link, GroupLink):
                    # It may read this memory for a while yet: the next gather must not write it.
                    self._buckets[index] = self._buckets[index].clone()
                name = self._group_name
                if self._link is link:
                    self.leave()
                raise SyncError(f"broadcasting version {version} to the {name} failed: {error}") from error
            return SendReport(
                version=version,
                checksums=checksums,
                num_bytes=self._manifest.num_bytes,
                seconds=time.perf_counter() - began,
            )


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
