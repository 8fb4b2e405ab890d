"""Verifiers in processes of their own, awaited from an event loop that they can never block.

A verifier that overruns its deadline is killed with its process, whatever it does; one that takes its process down
is told apart from those that only waited behind it, and these are judged again elsewhere.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, replace

from olmorl.contract.errors import ConfigError, OlmoRLError, WorkerError
from olmorl.rewards.handle import VerifierProcess
from olmorl.rewards.remote import RemoteVerifiers, is_remote
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Verdict, VerifierJob

MAX_BATCH = 32  # jobs in one message


@dataclass(slots=True, eq=False)
class _Ticket:
    """A job that waits for its verdict."""

    job: VerifierJob
    timeout: float
    verdict: asyncio.Future[Verdict]
    crashes: int = 0


class VerifierPool:
    """`workers` processes that have loaded `verifiers`. Belongs to the event loop that started it.

    A process may also die of something else (the kernel, short of memory, picks it), so a job gets a second try
    before its verdict is `error`; a timeout is final.
    """

    def __init__(
        self,
        verifiers: Iterable[str],
        *,
        workers: int = 1,
        timeout_seconds: float = 30.0,
        settings: VerifierSettings | None = None,
    ) -> None:
        """Raises ConfigError for an unknown verifier. `timeout_seconds` is for each verdict."""
        self._settings = replace(settings or VerifierSettings(), timeout_seconds=timeout_seconds)
        self._names = tuple(dict.fromkeys(verifiers))
        self._remote_names = tuple(name for name in self._names if is_remote(name, self._settings))
        self._verifiers = tuple(name for name in self._names if name not in self._remote_names)
        self._remote: RemoteVerifiers | None = None
        self._num_workers = workers if self._verifiers else 0
        self._timeout = timeout_seconds
        self._waiting: deque[_Ticket] = deque()
        self._open: set[_Ticket] = set()
        self._arrival = asyncio.Event()
        self._processes: list[VerifierProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: OlmoRLError | None = WorkerError("the verifier pool is not started")
        self.counts: Counter[str] = Counter()
        """verdicts by status, and "restarts" of processes"""

    async def __aenter__(self) -> "VerifierPool":
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Returns when every process has loaded its verifiers. Raises ConfigError when one cannot be loaded."""
        if self._remote_names:
            self._remote = RemoteVerifiers(self._remote_names, self._settings)

        async def start_one() -> None:
            self._processes.append(await VerifierProcess.start(self._verifiers, self._settings))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._num_workers):
                    group.create_task(start_one())
        except BaseException as error:
            await self.close()
            raise (error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error) from None
        self._failure = None
        for slot in range(self._num_workers):
            task = asyncio.create_task(self._serve(slot), name=f"verifier process {slot}")
            task.add_done_callback(self._on_end)
            self._tasks.append(task)

    async def score(self, jobs: Sequence[VerifierJob], *, timeout_seconds: float | None = None) -> list[Verdict]:
        """One verdict a job, in order. Raises WorkerError when the pool is closed or cannot restart its processes."""
        for job in jobs:
            if job.verifier not in self._names:
                raise ConfigError(f"verifier {job.verifier!r} is not loaded; loaded are {', '.join(self._names)}")
        if self._failure is not None:
            raise self._failure
        timeout = self._timeout if timeout_seconds is None else timeout_seconds
        return await asyncio.gather(*(self._ask(job, timeout) for job in jobs))

    def _ask(self, job: VerifierJob, timeout: float) -> Awaitable[Verdict]:
        if job.verifier in self._remote_names:
            return self._ask_remote(job, timeout)
        ticket = _Ticket(job, timeout, asyncio.get_running_loop().create_future())
        self._open.add(ticket)
        self._waiting.append(ticket)
        self._arrival.set()
        return ticket.verdict

    async def _ask_remote(self, job: VerifierJob, timeout: float) -> Verdict:
        assert self._remote is not None, "the pool is started"
        verdict = await self._remote.judge(job, timeout)
        self.counts[verdict.status] += 1
        return verdict

    def outage(self) -> tuple[float, str]:
        """The longest time that an endpoint has been failing, in seconds, and its last failure."""
        return self._remote.outage() if self._remote is not None else (0.0, "")

    async def close(self) -> None:
        """Kills the processes. Whoever still waits for a verdict gets a WorkerError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for process in self._processes:
            await process.kill()
        self._processes.clear()
        if self._remote is not None:
            await self._remote.close()
            self._remote = None
        self._fail(WorkerError("the verifier pool is closed"))

    async def _serve(self, slot: int) -> None:
        """Consumes waiting jobs, produces verdicts; waits for arrivals and its process; unblocked by `score`."""
        while True:
            if not await self._judge(self._processes[slot], await self._take()):
                self._processes[slot] = await VerifierProcess.start(self._verifiers, self._settings)
                self.counts["restarts"] += 1

    async def _judge(self, process: VerifierProcess, batch: list[_Ticket]) -> bool:
        """False when the process is gone; every job of the batch has its verdict or waits again."""
        running = iter(batch)
        failure = await process.judge(
            [ticket.job for ticket in batch],
            timeout=batch[0].timeout,
            answer=lambda verdict: self._settle(next(running), verdict),
        )
        if failure is None:
            return True
        culprit = next(running, None)
        if culprit is not None:
            self._blame(culprit, failure)
        self._put_back(running)
        return False

    async def _take(self) -> list[_Ticket]:
        """The next jobs for one process: half of its fair share, so that a slow job holds up few others."""
        while True:
            while self._waiting and self._waiting[0].verdict.done():  # nobody waits for it any more
                self._open.discard(self._waiting.popleft())
            if self._waiting:
                break
            self._arrival.clear()
            await self._arrival.wait()
        share = -(-len(self._waiting) // (2 * self._num_workers))
        batch = [self._waiting.popleft()]
        while len(batch) < min(share, MAX_BATCH) and self._waiting[0].timeout == batch[0].timeout:
            batch.append(self._waiting.popleft())
        return batch

    def _settle(self, ticket: _Ticket, verdict: Verdict) -> None:
        self._open.discard(ticket)
        self.counts[verdict.status] += 1
        if not ticket.verdict.done():
            ticket.verdict.set_result(verdict)

    def _blame(self, ticket: _Ticket, failure: Verdict) -> None:
        ticket.crashes += 1
        if failure.status == "error" and ticket.crashes < 2:
            self._put_back([ticket])
        else:
            self._settle(ticket, failure)

    def _put_back(self, tickets: Iterable[_Ticket]) -> None:
        self._waiting.extendleft(reversed(list(tickets)))
        self._arrival.set()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            message = f"a verifier process could not be replaced: {error}"
            self._fail(error if isinstance(error, OlmoRLError) else WorkerError(message))

    def _fail(self, failure: OlmoRLError) -> None:
        self._failure = failure
        for ticket in self._open:
            if not ticket.verdict.done():
                ticket.verdict.set_exception(failure)
        self._open.clear()
        self._waiting.clear()
