"""The two ways from the sender to this engine: a process group that copies, or memory that both sides map.

A link is made when all members are there, brings buckets in order, and is given up as a whole when anything fails.
Every wait ends at a deadline or when `interrupt` is set. Failures are RuntimeErrors, as torch's own.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist

from inference.shared_bucket import map_bucket
from olmorl.contract.errors import ConfigError
from olmorl.contract.weights import Bucket, Manifest, SyncGroup, shared_key

COMPLETION_POLL_SECONDS = 0.0005  # gloo's own wait cannot be interrupted
STORE_POLL_SECONDS = 0.002


class GroupLink:
    """gloo or NCCL: a broadcast for each bucket, into a buffer of ours."""

    def __init__(self, store: dist.Store, membership: SyncGroup) -> None:
        rank, size, timeout = membership.rank, membership.size, timedelta(seconds=membership.timeout_seconds)
        self.takes_host_memory = membership.transport == "gloo"
        if membership.transport == "gloo":
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        elif membership.transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            raise ConfigError(f"transport is {membership.transport!r}; it must be 'gloo', 'nccl' or 'ipc'")

    def receive(self, buffer: torch.Tensor, *, deadline: float, interrupt: Event) -> None:
        """`deadline` is of time.monotonic. When it fails, the buffer may still be written for a while."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        work = self._group.broadcast([buffer], options)
        while not work.is_completed():
            if interrupt.wait(COMPLETION_POLL_SECONDS):
                raise RuntimeError("interrupted by a reset")
        work.wait()


class SharedLink:
    """The sender's own buckets, mapped; they stay as they are until this engine has committed."""

    def __init__(
        self, store: dist.Store, membership: SyncGroup, manifest: Manifest, *, device: torch.device, interrupt: Event
    ) -> None:
        self._store, self._rank = store, membership.rank
        deadline = time.monotonic() + membership.timeout_seconds
        self._buckets: list[torch.Tensor] = []
        for bucket in manifest.buckets:
            key = shared_key("handle", self._rank, bucket.index)
            self._poll(key, deadline, interrupt)
            self._buckets.append(map_bucket(store.get(key).decode(), bucket.num_bytes, device=device))
        store.set(shared_key("joined", self._rank), "")

    def receive(self, bucket: Bucket, version: int, *, deadline: float, interrupt: Event) -> torch.Tensor:
        self._poll(shared_key("sent", version, bucket.index), deadline, interrupt)
        return self._buckets[bucket.index]

    def finish(self, version: int) -> None:
        """All buckets of the version were seen."""
        self._store.set(shared_key("taken", version, self._rank), "")

    def _poll(self, key: str, deadline: float, interrupt: Event) -> None:
        poll(lambda: self._store.check([key]), deadline, interrupt)


def poll(done: Callable[[], bool], deadline: float, interrupt: Event) -> None:
    while not done():
        if interrupt.wait(STORE_POLL_SECONDS):
            raise RuntimeError("interrupted by a reset")
        if time.monotonic() > deadline:
            raise RuntimeError("the deadline passed")
