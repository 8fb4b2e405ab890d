"""The receiving end of a weight update.

The caller's thread blocks in `receive`; transports, checksums and the check for infinities release the GIL. A group
that broke or missed its deadline is left at once: one late member would hold every later collective up, so the driver
forms a new group under a new epoch. A reset interrupts a receive that still waits.

Where the bytes lie until the commit is `staging`, for a model of B bytes in buckets of at most b:

    device   a second set of buffers beside the weights, kept from update to update: B on the device
    host     the same in the host's memory, pinned for a GPU: B on the host, b on the device where NCCL brings them
    none     the weights themselves, which the engine must not read before the update is whole: b on the device

Over `ipc` they stay in the sender's own buckets, which this process maps: nothing here, whatever the staging.

With quantised weights b is on the device in any case, and what is kept until the commit is the quantised tensors.
"""

import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from inference.model.decoder import Hold
from inference.receiver_link import GroupLink, SharedLink
from inference.staged_update import StagedUpdate, check_tensor
from olmorl.contract.errors import ConfigError, SyncError, WeightUpdateError
from olmorl.contract.weights import Bucket, Manifest, SyncGroup, TensorSpec, bucket_checksums, plan_buckets

STAGING = ("auto", "device", "host", "none")
SPARE_SHARE = 0.1  # of an update, that a device must have free beside it for staging "auto" to take the device


@dataclass(frozen=True, slots=True)
class ReceivedUpdate:
    version: int
    update: StagedUpdate
    seconds: float


class WeightReceiver:
    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        *,
        device: torch.device,
        weights: dict[str, torch.Tensor],
        hold: Hold | None = None,
    ) -> None:
        """`weights` are written by staging "none" alone. With `hold`, what it makes of each tensor is staged, and no
        bucket outlives its staging."""
        self.specs = specs
        self._hold = hold
        self.device = device
        self.staging = "device"
        self._weights = weights
        self._manifest: Manifest | None = None
        self._buffers: dict[int, torch.Tensor] = {}  # by bucket: staging "device" and "host"
        self._scratch: torch.Tensor | None = None  # on the device, as large as the largest bucket
        self._link: GroupLink | SharedLink | None = None
        self._membership: SyncGroup | None = None
        self._received: ReceivedUpdate | None = None
        self._joining = -1  # epoch of the newest call of join
        self._interrupt = threading.Event()  # one for each membership

    def plan(self, bucket_bytes: int, staging: str = "device") -> Manifest:
        """Both sides cut the same tensors by the same rule, so only the bound need be agreed on."""
        if staging not in STAGING:
            raise ConfigError(f"sync.staging is {staging!r}; it must be one of {', '.join(STAGING)}")
        in_parts = self._hold is None and any(self._weights[spec.name].shape != spec.shape for spec in self.specs)
        if staging == "none" and in_parts:
            raise ConfigError("sync.staging = 'none' receives whole tensors into place: it needs tensor_parallel = 1")
        self._manifest = plan_buckets(self.specs, bucket_bytes=bucket_bytes)
        self.staging = self._pick(self._manifest.num_bytes) if staging == "auto" else staging
        self._drop_buffers()
        return self._manifest

    def join(self, membership: SyncGroup) -> None:
        """Blocks until all members of the group are there, or the deadline passes."""
        self.leave()
        self.discard()
        if self._manifest is None:
            raise SyncError("no buckets are planned; plan_updates comes first")
        self._joining = membership.epoch
        interrupt = self._interrupt = threading.Event()
        timeout = timedelta(seconds=membership.timeout_seconds)
        try:
            store = dist.TCPStore(membership.host, membership.port, is_master=False, timeout=timeout)
            prefixed = dist.PrefixStore(f"sync/{membership.epoch}", store)
            link: GroupLink | SharedLink
            if membership.transport == "ipc":
                link = SharedLink(prefixed, membership, self._manifest, device=self.device, interrupt=interrupt)
            else:
                link = GroupLink(prefixed, membership)
        except RuntimeError as error:
            raise SyncError(f"{_who(membership)} could not join: {error}") from None
        if self._joining != membership.epoch:
            raise SyncError(f"{_who(membership)} was reset while it joined")
        self._link, self._membership = link, membership

    def leave(self) -> None:
        self._interrupt.set()
        self._link = self._membership = None

    def reset(self, epoch: int) -> None:
        """Leave the group, unless it is newer than `epoch`, and drop what is staged."""
        if self._joining <= epoch:
            self._joining = -1
            self.leave()
        self.discard()

    @property
    def writes_in_place(self) -> bool:
        """True when `receive` changes the weights themselves: no step may be made until a whole update is committed."""
        return self.staging == "none" and isinstance(self._link, GroupLink)

    def receive(self, version: int) -> None:
        """Blocks until every bucket is staged and summed. SyncError: nothing is staged and the group is left."""
        link, membership, interrupt = self._link, self._membership, self._interrupt
        if link is None or membership is None or self._manifest is None:
            raise SyncError("this worker is in no sync group; join_sync_group comes first")
        self.discard()
        started = time.monotonic()
        deadline = started + membership.timeout_seconds
        update = StagedUpdate({}, in_place=self.writes_in_place)
        refusal: WeightUpdateError | None = None
        for bucket in self._manifest.buckets:
            try:
                if isinstance(link, SharedLink):
                    data = link.receive(bucket, version, deadline=deadline, interrupt=interrupt)
                else:
                    data = self._receive_copy(link, bucket, deadline=deadline, interrupt=interrupt)
            except RuntimeError as error:
                if self._membership is membership:
                    self.leave()
                raise SyncError(
                    f"{_who(membership)} waited for bucket {bucket.index + 1} of version {version} from rank 0: {error}"
                ) from None
            if refusal is None:  # later buckets must still be taken, or the sender would wait for us
                try:
                    self._stage(bucket, data, update)
                except WeightUpdateError as error:
                    refusal = error
        if isinstance(link, SharedLink):
            link.finish(version)
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
            state = "the weights in place are torn" if received.update.in_place else "nothing was changed"
            raise WeightUpdateError(
                f"checksums of {len(wrong)} of {len(ours)} tensors differ from the sender's, "
                f"first {(wrong or sorted(checksums.keys() - ours.keys()))[0]!r}; {state}"
            )
        return received

    def discard(self, version: int | None = None) -> bool:
        """Drop what is staged; with `version`, only if it is that one. True if there was something to drop."""
        received = self._received
        if received is None or version not in (None, received.version):
            return False
        self._received = None
        return True

    def _receive_copy(
        self, link: GroupLink, bucket: Bucket, *, deadline: float, interrupt: threading.Event
    ) -> torch.Tensor:
        """The bucket in a buffer of ours, where staging wants it."""
        place = self._place(bucket)
        arrives = place
        if place.device.type != self.device.type and not link.takes_host_memory:
            arrives = self._scratch_of(bucket.num_bytes)
        try:
            link.receive(arrives, deadline=deadline, interrupt=interrupt)
        except RuntimeError:
            self._drop_buffers()  # the transport may write into them for a while yet
            raise
        if arrives is not place:
            place.copy_(arrives)
        return place

    def _place(self, bucket: Bucket) -> torch.Tensor:
        if self.staging == "none" or self._hold is not None:
            return self._scratch_of(bucket.num_bytes)
        if bucket.index not in self._buffers:
            pinned = self.staging == "host" and self.device.type == "cuda"
            device = torch.device("cpu") if self.staging == "host" else self.device
            self._buffers[bucket.index] = torch.empty(
                bucket.num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned
            )
        return self._buffers[bucket.index]

    def _scratch_of(self, num_bytes: int) -> torch.Tensor:
        assert self._manifest is not None, "no buckets are planned"
        if self._scratch is None:
            largest = max(bucket.num_bytes for bucket in self._manifest.buckets)
            self._scratch = torch.empty(largest, dtype=torch.uint8, device=self.device)
        return self._scratch[:num_bytes]

    def _drop_buffers(self) -> None:
        self._buffers = {}
        self._scratch = None

    def _stage(self, bucket: Bucket, data: torch.Tensor, update: StagedUpdate) -> None:
        for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            flat = data[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype))
            tensor = check_tensor(flat.view(spec.shape), spec, device=data.device, copy=False)
            for key, stored in self._stored(spec.name, tensor, in_place=update.in_place).items():
                if update.in_place:
                    self._weights[key].copy_(stored)
                else:
                    update.tensors[key] = stored
        update.checksums |= bucket_checksums(bucket, data.cpu().numpy())

    def _stored(self, name: str, tensor: torch.Tensor, *, in_place: bool) -> dict[str, torch.Tensor]:
        """By key of the weights. With `hold` it shares no memory with the bucket, unless it goes straight in place."""
        if self._hold is None:
            return {name: tensor}
        held = self._hold(name, tensor)
        if in_place:
            return held
        home = torch.device("cpu") if self.staging == "host" else self.device
        return {key: part.to(home, copy=part is tensor) for key, part in held.items()}

    def _pick(self, num_bytes: int) -> str:
        if self.device.type != "cuda":
            return "device"
        free, _ = torch.cuda.mem_get_info(self.device)
        return "device" if free > num_bytes * (1 + SPARE_SHARE) else "host"


def _who(membership: SyncGroup) -> str:
    return f"rank {membership.rank} of {membership.size} (sync epoch {membership.epoch})"
