"""The two ways from the sender to its engines: a process group that copies, or memory that both sides map.

A link is made when all members are there, sends buckets in order, and is given up as a whole when anything fails.
Every wait ends at a deadline or when `interrupt` is set. Failures are RuntimeErrors, as torch's own.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from learner.shared_bucket import SharedBucket
from olmorl.contract.weights import SyncGroup, shared_key

COMPLETION_POLL_SECONDS = 0.0005  # gloo's own wait cannot be interrupted
STORE_POLL_SECONDS = 0.002


class SenderLink(Protocol):
    def send(self, index: int, data: Tensor, *, version: int, deadline: float, interrupt: Event) -> None:
        """Give bucket `index` on its way. `deadline` is of time.perf_counter."""

    def finish(self, version: int, *, deadline: float, interrupt: Event) -> None:
        """Return when every engine has every bucket."""


class GroupLink:
    """gloo or NCCL: a broadcast for each bucket."""

    def __init__(self, store: dist.Store, group: SyncGroup) -> None:
        timeout = timedelta(seconds=group.timeout_seconds)
        if group.transport == "gloo":
            self._group: Any = dist.ProcessGroupGloo(store, group.rank, group.size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, group.rank, group.size, options)

    def send(self, index: int, data: Tensor, *, version: int, deadline: float, interrupt: Event) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(0.001, deadline - time.perf_counter()))
        work = self._group.broadcast([data], options)
        while not work.is_completed():
            if interrupt.wait(COMPLETION_POLL_SECONDS):
                raise RuntimeError("interrupted by a reset")
        work.wait()
        if data.is_cuda:
            torch.cuda.current_stream().synchronize()  # NCCL's wait orders streams, not this thread

    def finish(self, version: int, *, deadline: float, interrupt: Event) -> None:
        """A broadcast that ended has reached everybody."""


class SharedLink:
    """The engines map the sender's buckets; only words travel, through the store: here it is, I have seen it."""

    def __init__(self, store: dist.Store, group: SyncGroup, buckets: list[SharedBucket], *, interrupt: Event) -> None:
        self._store = store
        self._ranks = range(1, group.size)
        self._sent: list[str] = []
        for rank in self._ranks:
            for index, bucket in enumerate(buckets):
                store.set(shared_key("handle", rank, index), bucket.handle())
        deadline = time.perf_counter() + group.timeout_seconds
        poll(lambda: store.check([shared_key("joined", rank) for rank in self._ranks]), deadline, interrupt)

    def send(self, index: int, data: Tensor, *, version: int, deadline: float, interrupt: Event) -> None:
        if data.is_cuda:
            torch.cuda.synchronize(data.device)  # what was gathered stands there before anybody is told
        self._sent.append(shared_key("sent", version, index))
        self._store.set(self._sent[-1], "")

    def finish(self, version: int, *, deadline: float, interrupt: Event) -> None:
        keys = [shared_key("taken", version, rank) for rank in self._ranks]
        poll(lambda: self._store.check(keys), deadline, interrupt)
        for key in self._sent + keys:  # nobody asks for them any more, and a run has many versions
            self._store.delete_key(key)
        self._sent.clear()


def poll(done: Callable[[], bool], deadline: float, interrupt: Event) -> None:
    while not done():
        if interrupt.wait(STORE_POLL_SECONDS):
            raise RuntimeError("interrupted by a reset")
        if time.perf_counter() > deadline:
            raise RuntimeError("the deadline passed")
