"""Generation as the driver sees it: send a request to a worker, get its samples back one by one as they finish.

Finished samples of all requests of a worker come back through one long poll, many at a time. Workers come and go:
when one is removed, what it had finished stays and what it had not is issued again elsewhere, with the same seed and
sample index under a new lease. A sample whose lease is not the one its request is out under is dropped and counted.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import DrainReply, RolloutRequest, RolloutSample, SamplingParams
from olmorl.controller.cluster import Remote
from olmorl.controller.router import Router
from olmorl.controller.signal import Changed

POLL_SECONDS = 1.0  # how long a worker may hold a poll open while nothing finishes
ANSWER_SECONDS = 60.0  # beyond that: a worker that stays silent this long is taken for lost


@dataclass(slots=True, eq=False)
class _Issued:
    """A request that is out, or waits for a worker that could take it."""

    request_id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    priority: int
    missing: set[int]
    """sample indices not received yet"""
    prefer: str | None = None
    """the worker that should take it"""
    lengths: tuple[int, ...] | None = None
    """of all params.n samples"""
    lease: int = 0
    worker: str | None = None
    inbox: asyncio.Queue[RolloutSample] = field(default_factory=asyncio.Queue)

    def request(self) -> RolloutRequest:
        indices = tuple(sorted(self.missing))
        return RolloutRequest(
            request_id=self.request_id,
            lease=self.lease,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            sample_indices=indices,
            priority=self.priority,
            lengths=None if self.lengths is None else tuple(self.lengths[i] for i in indices),
        )


@dataclass(slots=True, eq=False)
class _Worker:
    remote: Remote
    outbox: list[RolloutRequest] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    tokens_received: int = 0


class RolloutService:
    """Samples from the inference workers that were added. Belongs to the event loop it is used on."""

    def __init__(self, *, on_lost: Callable[[str, str], None]) -> None:
        """`on_lost(worker, reason)` is told when a worker fails; it is asked for nothing more until it is removed."""
        self._on_lost = on_lost
        self._workers: dict[str, _Worker] = {}
        self._router = Router()
        self._issued: dict[str, _Issued] = {}
        self._homeless: list[_Issued] = []  # no worker was there to take them
        self._next_lease = 0
        self._outbox_filled = Changed()
        self._received = Changed()
        self._gate = Changed()
        self._open = True
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stats: dict[str, dict[str, float]] = {}
        """newest counters of each worker; `as_of`: when they came, seconds since the epoch"""
        self.tokens_received = 0
        self.lost_tokens = 0
        """counted by workers that were removed, and never received"""
        self.late_samples = 0
        self.reissued_requests = 0
        """asked for again, in part or whole, because their worker was removed"""
        self._undelivered_tokens = 0

    # Workers

    def ensure_worker(self, remote: Remote) -> None:
        """It takes requests from now on, if it did not already."""
        if remote.name in self._workers:
            return
        worker = self._workers[remote.name] = _Worker(remote)
        self._router.add(remote.name)
        self.stats.setdefault(remote.name, {})
        for loop in (self._submit_loop, self._drain_loop):
            worker.tasks.append(asyncio.create_task(self._watched(worker, loop), name=remote.name))
        homeless, self._homeless = self._homeless, []
        for issued in homeless:
            self._issue(issued)

    def remove_worker(self, name: str) -> None:
        """It is asked for nothing more; what it had not finished is issued again. Nothing for an unknown name."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        for task in worker.tasks:
            task.cancel()
        self._router.remove(name)
        counted = int(self.stats.pop(name).get("output_tokens", 0))
        self.lost_tokens += counted - worker.tokens_received
        for issued in self._issued.values():
            if issued.worker == name and issued.missing:
                self.reissued_requests += 1
                self._issue(issued)

    async def run(self) -> None:
        """Raises what broke the loops of a worker, other than the worker. Else runs until cancelled."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        tasks = [task for worker in self._workers.values() for task in worker.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Requests

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        sample_indices: tuple[int, ...] | None = None,
        prefer: str | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> AsyncGenerator[list[RolloutSample], None]:
        """Yields the params.n samples of one prompt, or those of `sample_indices`, as they finish, some at a time. Who
        may stop early closes it. `prefer` names the worker that has most of the prompt's KV. `lengths` are what each of
        the params.n samples is to have, whatever the model says; to have EOS ignored is the caller's part."""
        await self._gate.until(lambda: self._open or priority < 0)
        assert request_id not in self._issued, f"request {request_id} is already in flight"
        missing = set(range(params.n) if sample_indices is None else sample_indices)
        issued = _Issued(request_id, prompt_token_ids, params, priority, missing, prefer, lengths)
        self._issued[request_id] = issued
        self._issue(issued)
        undelivered = len(missing)
        try:
            while undelivered:
                samples = [await issued.inbox.get()]
                while not issued.inbox.empty():
                    samples.append(issued.inbox.get_nowait())
                undelivered -= len(samples)
                self._undelivered_tokens -= sum(len(sample.token_ids) for sample in samples)
                yield samples
        finally:
            del self._issued[request_id]
            if issued in self._homeless:
                self._homeless.remove(issued)
            if issued.worker is not None:
                self._router.finished(issued.worker, len(issued.missing))
            self._received.notify()

    @property
    def undelivered_tokens(self) -> int:
        """Received, and not yet fetched by who asked for them."""
        return self._undelivered_tokens

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests whose samples are not all in."""
        return [request_id for request_id, issued in self._issued.items() if issued.missing]

    async def abort(self, request_ids: list[str]) -> None:
        """Tell the workers to give up these requests; what they had so far arrives late and is dropped."""
        remotes = [worker.remote for worker in self._workers.values()]
        calls = (remote.call("abort", request_ids, timeout=ANSWER_SECONDS) for remote in remotes)
        for remote, result in zip(remotes, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, WorkerError):
                self._on_lost(remote.name, str(result))
            elif isinstance(result, BaseException):
                raise result

    def hold(self) -> None:
        """New training requests wait at the gate until `release()`; evaluation passes."""
        self._open = False

    def release(self) -> None:
        self._open = True
        self._gate.notify()

    async def idle(self) -> None:
        """Wait until no sample is asked for: also none on its way to a worker, which a worker could not tell."""
        await self._received.until(lambda: not self.in_flight)

    def _issue(self, issued: _Issued) -> None:
        """Send what is missing to the least busy worker, under a new lease."""
        self._next_lease += 1
        issued.lease = self._next_lease
        issued.worker = self._router.pick(len(issued.missing), prefer=issued.prefer)
        if issued.worker is None:
            self._homeless.append(issued)
            return
        self._workers[issued.worker].outbox.append(issued.request())
        self._outbox_filled.notify()

    # Loops, two a worker

    async def _watched(self, worker: _Worker, loop: Callable[[_Worker], Coroutine[Any, Any, None]]) -> None:
        try:
            await loop(worker)
        except WorkerError as error:
            self._on_lost(worker.remote.name, str(error))
        except Exception as error:  # a bug here: `run` raises it
            if not self._failed.done():
                self._failed.set_exception(error)

    async def _submit_loop(self, worker: _Worker) -> None:
        """Consumes the outbox; waits for it to fill; unblocked by `_issue`."""
        while True:
            await self._outbox_filled.until(lambda: bool(worker.outbox))
            requests, worker.outbox = worker.outbox, []
            await worker.remote.call("submit", requests, timeout=ANSWER_SECONDS)

    async def _drain_loop(self, worker: _Worker) -> None:
        """Produces samples; waits for the worker; runs until the worker is removed."""
        while True:
            timeout = POLL_SECONDS + ANSWER_SECONDS
            reply: DrainReply = await worker.remote.call("drain", POLL_SECONDS, timeout=timeout)
            self.stats[worker.remote.name] = {**reply.stats, "as_of": time.time()}
            for sample in reply.samples:
                self._receive(sample)
            self._received.notify()

    def _receive(self, sample: RolloutSample) -> None:
        issued = self._issued.get(sample.request_id)
        if issued is None or issued.lease != sample.lease or sample.sample_index not in issued.missing:
            self.late_samples += 1
            return
        assert issued.worker is not None, "a lease without a worker"
        issued.missing.discard(sample.sample_index)
        self._router.finished(issued.worker, 1)
        self._workers[issued.worker].tokens_received += len(sample.token_ids)
        self.tokens_received += len(sample.token_ids)
        self._undelivered_tokens += len(sample.token_ids)
        issued.inbox.put_nowait(sample)
