"""What runs beside the main line of a session, watched so that a failure there is never waited past."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from olmorl.contract.errors import WorkerError

T = TypeVar("T")

UPDATE = "update"  # the job that sends new weights out


class Background:
    """Loops run until they are stopped; one that ends by itself has failed. A job ends, and may fail doing so.

    Of each name there is one at a time.
    """

    def __init__(self) -> None:
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, asyncio.Task[None]] = {}

    def start_loop(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._loops[name] = asyncio.create_task(work, name=name)

    async def stop_loop(self, name: str) -> None:
        """Cancel it and wait for its end; nothing if it does not run."""
        task = self._loops.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def runs(self, name: str) -> bool:
        return name in self._loops

    def start_job(self, work: Coroutine[Any, Any, None], *, name: str = UPDATE) -> None:
        assert name not in self._jobs, f"finish_job({name!r}) first: there is one at a time"
        self._jobs[name] = asyncio.create_task(work, name=name)

    async def finish_job(self, name: str = UPDATE) -> None:
        """Wait for the job of that name, if there is one."""
        if name in self._jobs:
            await self.unless_failed(self._jobs[name])
            del self._jobs[name]

    async def end_job(self, name: str, *, timeout: float, needs: str) -> None:
        """Give the job of that name, if there is one, so long to end, well or not; but no longer than the loop that it
        needs goes on."""
        if name in self._jobs:
            watched = [self._jobs[name], self._loops[needs]]
            await asyncio.wait(watched, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    async def unless_failed(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """Await `work`, but raise at once if something in the background fails meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                jobs = [job for job in self._jobs.values() if not job.done()]
                await asyncio.wait([task, *self._loops.values(), *jobs], return_when=asyncio.FIRST_COMPLETED)
                self._raise_failure()
                if task.done():
                    return task.result()
        finally:
            task.cancel()

    async def close(self) -> None:
        """Cancel everything and wait for its end."""
        tasks = [*self._loops.values(), *self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _raise_failure(self) -> None:
        for name, loop in self._loops.items():
            if loop.done():
                raise first_cause(loop.exception() or WorkerError(f"the {name} loop ended by itself"))
        for job in self._jobs.values():
            if job.done() and (error := job.exception()) is not None:
                raise first_cause(error)


def first_cause(error: BaseException) -> BaseException:
    """The exception inside the groups that nested task groups wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
