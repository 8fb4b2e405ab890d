"""Generation as the driver sees it: send a request to a worker, get its samples back one by one as they finish.

Finished samples of all requests of a worker come back through one long poll, many at a time. A sample whose lease is
not the one its request was issued under is dropped and counted.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import numpy as np

from olmorl.contract.generation import DrainReply, RolloutRequest, RolloutSample, SamplingParams
from olmorl.controller.cluster import Remote
from olmorl.controller.router import Router
from olmorl.controller.signal import Changed

POLL_SECONDS = 5.0  # how long a worker may hold a poll open while nothing finishes
ANSWER_SECONDS = 60.0  # beyond that: a worker that stays silent this long is taken for lost


@dataclass(slots=True)
class _Issued:
    """A request that a worker has, or will get."""

    lease: int
    missing: int
    """samples not received yet"""
    inbox: asyncio.Queue[RolloutSample] = field(default_factory=asyncio.Queue)


class RolloutService:
    """Samples from the inference workers. `run()` must be running for anything to come back."""

    def __init__(self, workers: Sequence[Remote]) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._router = Router(list(self._workers))
        self._outboxes: dict[str, list[RolloutRequest]] = {name: [] for name in self._workers}
        self._outbox_filled = Changed()
        self._issued: dict[str, _Issued] = {}
        self._next_lease = 0
        self._received = Changed()
        self._open = True
        self._gate = Changed()
        self.stats: dict[str, dict[str, float]] = {name: {} for name in self._workers}
        self.tokens_received = 0
        self._undelivered_tokens = 0
        self.late_samples = 0

    async def generate(
        self, request_id: str, prompt_token_ids: np.ndarray, params: SamplingParams, *, priority: int = 0
    ) -> AsyncGenerator[list[RolloutSample], None]:
        """Yields the params.n samples of one prompt as they finish, some at a time. Who may stop early closes it."""
        await self._gate.until(lambda: self._open or priority < 0)
        assert request_id not in self._issued, f"request {request_id} is already in flight"
        worker = self._router.pick(params.n)
        self._next_lease += 1
        issued = self._issued[request_id] = _Issued(self._next_lease, params.n)
        self._outboxes[worker].append(
            RolloutRequest(
                request_id=request_id,
                lease=issued.lease,
                prompt_token_ids=prompt_token_ids,
                params=params,
                sample_indices=tuple(range(params.n)),
                priority=priority,
            )
        )
        self._outbox_filled.notify()
        undelivered = params.n
        try:
            while undelivered:
                samples = [await issued.inbox.get()]
                while not issued.inbox.empty():
                    samples.append(issued.inbox.get_nowait())
                undelivered -= len(samples)
                self._undelivered_tokens -= sum(len(sample.token_ids) for sample in samples)
                yield samples
        finally:
            self._router.finished(worker, params.n)
            del self._issued[request_id]
            self._received.notify()

    @property
    def undelivered_tokens(self) -> int:
        """Received, and not yet fetched by who asked for them."""
        return self._undelivered_tokens

    def hold(self) -> None:
        """New training requests wait at the gate until `release()`; evaluation passes."""
        self._open = False

    def release(self) -> None:
        self._open = True
        self._gate.notify()

    async def idle(self) -> None:
        """Wait until no sample is asked for: also none on its way to a worker, which a worker could not tell."""
        await self._received.until(lambda: not self.in_flight)

    async def run(self) -> None:
        """Consumes outboxes and worker polls, produces samples; waits for workers; runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers.values():
                tasks.create_task(self._submit_loop(worker))
                tasks.create_task(self._drain_loop(worker))

    async def _submit_loop(self, worker: Remote) -> None:
        outbox = self._outboxes[worker.name]
        while True:
            await self._outbox_filled.until(lambda: bool(outbox))
            requests = outbox.copy()
            outbox.clear()
            await worker.call("submit", requests, timeout=ANSWER_SECONDS)

    async def _drain_loop(self, worker: Remote) -> None:
        while True:
            reply: DrainReply = await worker.call("drain", POLL_SECONDS, timeout=POLL_SECONDS + ANSWER_SECONDS)
            self.stats[worker.name] = reply.stats
            for sample in reply.samples:
                issued = self._issued.get(sample.request_id)
                if issued is None or issued.lease != sample.lease:
                    self.late_samples += 1
                    continue
                issued.missing -= 1
                self.tokens_received += len(sample.token_ids)
                self._undelivered_tokens += len(sample.token_ids)
                issued.inbox.put_nowait(sample)
            self._received.notify()

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests whose samples are not all in."""
        return [request_id for request_id, issued in self._issued.items() if issued.missing]

    async def abort(self, request_ids: list[str]) -> None:
        """Tell the workers to give up these requests; what they had so far arrives late and is dropped."""
        workers = self._workers.values()
        await asyncio.gather(*(worker.call("abort", request_ids, timeout=ANSWER_SECONDS) for worker in workers))
