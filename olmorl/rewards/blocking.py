"""`score`: one verdict, blocking, from any thread, also inside a notebook's event loop.

The verifier runs in a process that is started at its first use and kept, for starting one takes longer than most
verdicts. It ends with this program.
"""

import asyncio
import atexit
import threading
from functools import cache

from olmorl.rewards.pool import VerifierPool
from olmorl.rewards.verdict import Verdict, VerifierJob


def score(
    verifier: str, *, completion: str, ground_truth: object, prompt: str | None = None, timeout: float = 30.0
) -> Verdict:
    """Judge one completion within `timeout` seconds; a verifier that asks for `num_tokens` gets the number of words.

    Raises ConfigError for a verifier that cannot be loaded.
    """
    words = len(completion.split())
    job = VerifierJob(
        verifier=verifier, completion=completion, ground_truth=ground_truth, prompt=prompt, num_tokens=words
    )
    return _desk().submit(job, timeout)


@cache
def _desk() -> "_Desk":
    desk = _Desk()
    atexit.register(desk.close)
    return desk


class _Desk:
    """An event loop in a thread of its own, with one pool of one process for each verifier asked for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pools: dict[str, VerifierPool] = {}
        self._starting = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="verifiers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def submit(self, job: VerifierJob, timeout: float) -> Verdict:
        return asyncio.run_coroutine_threadsafe(self._score(job, timeout), self._loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _close(self) -> None:
        for pool in self._pools.values():
            await pool.close()

    async def _score(self, job: VerifierJob, timeout: float) -> Verdict:
        async with self._starting:
            if job.verifier not in self._pools:
                pool = VerifierPool([job.verifier])
                await pool.start()
                self._pools[job.verifier] = pool
        [verdict] = await self._pools[job.verifier].score([job], timeout_seconds=timeout)
        return verdict
