"""The receiving end of a weight broadcast: buckets arrive into staging while the engine decodes on.

The caller's thread blocks in `receive`; gloo, CRC-32 and the finiteness check all release the GIL. Nothing here
touches a weight that serves. A group that broke or missed its deadline is left at once: one late member would hold
every later collective up, so the driver forms a new group under a new epoch. A reset interrupts a receive that still
waits; what the transport does with its buffers after that concerns nobody.
"""

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inference.model.decoder import Hold
from inference.model.wire import checksum
from inference.staged_update import StagedUpdate, check_tensor
from olmorl.contract.errors import ConfigError, SyncError, WeightUpdateError
from olmorl.contract.weights import Bucket, Manifest, SyncGroup, TensorSpec, plan_buckets

COMPLETION_POLL_SECONDS = 0.0005  # gloo's own wait cannot be interrupted


@dataclass(frozen=True, slots=True)
class ReceivedUpdate:
    version: int
    update: StagedUpdate
    seconds: float


class WeightReceiver:
    def __init__(self, specs: tuple[TensorSpec, ...], *, device: torch.device, hold: Hold | None = None) -> None:
        """With `hold`, what is staged is what it makes of each tensor, and no bucket outlives its staging."""
        self.specs = specs
        self._hold = hold
        self.device = device
        self._manifest: Manifest | None = None
        self._group: Any = None
        self._membership: SyncGroup | None = None
        self._received: ReceivedUpdate | None = None
        self._joining = -1  # epoch of the newest call of join
        self._interrupt = threading.Event()  # one for each membership

    def plan(self, bucket_bytes: int) -> Manifest:
        """Both sides cut the same tensors by the same rule, so only the bound need be agreed on."""
        self._manifest = plan_buckets(self.specs, bucket_bytes=bucket_bytes)
        return self._manifest

    def join(self, membership: SyncGroup) -> None:
        """Blocks until all members of the group are there, or the deadline passes."""
        self.leave()
        self.discard()
        self._joining = membership.epoch
        timeout = timedelta(seconds=membership.timeout_seconds)
        try:
            store = dist.TCPStore(membership.host, membership.port, is_master=False, timeout=timeout)
            prefixed = dist.PrefixStore(f"sync/{membership.epoch}", store)
            group = _process_group(membership, prefixed, timeout)
        except RuntimeError as error:
            raise SyncError(f"{_who(membership)} could not join: {error}") from None
        if self._joining != membership.epoch:
            raise SyncError(f"{_who(membership)} was reset while it joined")
        self._group, self._membership, self._interrupt = group, membership, threading.Event()

    def leave(self) -> None:
        self._interrupt.set()
        self._group = self._membership = None

    def reset(self, epoch: int) -> None:
        """Leave the group, unless it is newer than `epoch`, and drop what is staged."""
        if self._joining <= epoch:
            self._joining = -1
            self.leave()
        self.discard()

    def receive(self, version: int) -> None:
        """Blocks until every bucket is staged and summed. SyncError: nothing is staged and the group is left."""
        group, membership = self._group, self._membership
        if group is None or membership is None:
            raise SyncError("this worker is in no sync group; join_sync_group comes first")
        if self._manifest is None:
            raise SyncError("no buckets are planned; plan_updates comes first")
        self.discard()
        started = time.monotonic()
        deadline = started + membership.timeout_seconds
        update = StagedUpdate({})
        refusal: WeightUpdateError | None = None
        for bucket in self._manifest.buckets:
            buffer = self._receive_bucket(bucket, version, group=group, membership=membership, deadline=deadline)
            try:
                self._stage(bucket, buffer, update)
            except WeightUpdateError as error:  # later buckets must still be taken, or the sender would wait for us
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        if self._membership is not membership:
            raise SyncError(f"{_who(membership)} left while it received version {version}; nothing is staged")
        self._received = ReceivedUpdate(version, update, time.monotonic() - started)

    def take(self, version: int, checksums: dict[str, int]) -> ReceivedUpdate:
        """The staged update, if it is this version and what was sent. Staging is empty afterwards in any case."""
        received, self._received = self._received, None
        if received is None or received.version != version:
            have = "nothing" if received is None else f"version {received.version}"
            raise WeightUpdateError(f"version {version} is to be committed, but {have} is staged; nothing was changed")
        ours = received.update.checksums
        wrong = [name for name in ours if ours[name] != checksums.get(name)]
        if wrong or len(ours) != len(checksums):
            raise WeightUpdateError(
                f"checksums of {len(wrong)} of {len(ours)} tensors differ from the sender's, "
                f"first {(wrong or sorted(checksums.keys() - ours.keys()))[0]!r}; nothing was changed"
            )
        return received

    def discard(self, version: int | None = None) -> None:
        """Drop what is staged; with `version`, only if it is that one."""
        received = self._received
        if received is not None and version in (None, received.version):
            self._received = None

    def _receive_bucket(
        self, bucket: Bucket, version: int, *, group: Any, membership: SyncGroup, deadline: float
    ) -> torch.Tensor:
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            work = group.broadcast([buffer], options)
            while not work.is_completed():
                if self._interrupt.wait(COMPLETION_POLL_SECONDS):
                    raise RuntimeError("interrupted by a reset")
            work.wait()
        except RuntimeError as error:
            if self._membership is membership:
                self.leave()
            raise SyncError(
                f"{_who(membership)} waited for bucket {bucket.index + 1} of version {version} from rank 0: {error}"
            ) from None
        return buffer

    def _stage(self, bucket: Bucket, buffer: torch.Tensor, update: StagedUpdate) -> None:
        for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            flat = buffer[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype))
            tensor = check_tensor(flat.view(spec.shape), spec, device=self.device, copy=False)
            update.checksums[spec.name] = checksum(tensor)
            if self._hold is None:
                update.tensors[spec.name] = tensor
            else:
                for key, held in self._hold(spec.name, tensor).items():
                    update.tensors[key] = held.clone() if held is tensor else held


def _process_group(membership: SyncGroup, store: Any, timeout: timedelta) -> Any:
    rank, size = membership.rank, membership.size
    if membership.transport == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if membership.transport == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ConfigError(f"transport is {membership.transport!r}; it must be 'gloo' or 'nccl'")


def _who(membership: SyncGroup) -> str:
    return f"rank {membership.rank} of {membership.size} (sync epoch {membership.epoch})"
