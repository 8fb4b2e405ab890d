"""An engine on its thread, as an event loop sees it: requests go in, word of their progress comes back.

The loop never waits for the engine: a request and its end are commands that the engine takes between two steps, in
order, so that an abort always finds its request. The engine never waits for the loop: after a step it notes how far the
streamed samples have come and rings once, however many are read and however slowly.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from concurrent.futures import Future

from inference.engine import Engine
from inference.engine_thread import EngineThread
from inference.request import Request, Sequence
from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import SamplingParams


class Generation:
    """One request. `close` it, finished or not: what is left of it then is given up at once."""

    def __init__(
        self, owner: "Generations", request_id: str, prompt: list[int], params: SamplingParams, bell: asyncio.Event
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.request: Request | None = None
        """None until the engine took it"""
        self.ready: list[int] = []
        """output tokens of each sample as of the last step, if they are streamed"""
        self.ended: set[int] = set()
        """samples that will not change any more; nobody looks at the end of one before it is here"""
        self.t_asked = time.time()
        self._owner = owner
        self.failure: WorkerError | None = None
        self.bell = bell
        """rings when there is news: the end, or any token of a streamed request"""
        self._counted = True

    @property
    def sequences(self) -> list[Sequence]:
        return [] if self.request is None else self.request.sequences

    @property
    def finished(self) -> bool:
        return len(self.ended) == self.params.n

    def check(self) -> None:
        """Raises WorkerError when there will be no end."""
        self._owner.check()
        if self.failure is not None:
            raise self.failure

    def expire(self, reason: str) -> None:
        """Its samples end where they are, as aborted because of `reason`."""
        self._owner._abort(self, reason)

    def close(self) -> None:
        self._owner._close(self)


class Generations:
    """Belongs to the event loop it is made on. Close it before that loop ends."""

    def __init__(self, engine: Engine, *, max_samples: int, on_end: Callable[[Generation], None]) -> None:
        """`on_end` is told of every request that finished, on the event loop."""
        self.engine = engine
        self.max_samples = max_samples
        self.num_held = 0
        """samples of requests that are not finished"""
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._over: str | None = None
        """why no request is taken any more"""
        self._open: dict[str, Generation] = {}
        self._streamed: set[Generation] = set()
        # The engine's thread alone:
        self._followed: dict[str, Generation] = {}
        # Both threads, each by one operation that cannot be torn:
        self._rung = False
        self._ended: deque[Generation] = deque()
        self.thread = EngineThread(engine, on_finished=self._collect, on_step=self._after_step)

    def start(
        self, prompt: list[int], params: SamplingParams, *, bell: asyncio.Event, streamed: bool = False
    ) -> Generation:
        """Raises ValueError for what can never run, WorkerError when the engine is gone or this has ended."""
        if self._over is not None:
            raise WorkerError(self._over)
        self.engine.check(prompt, params)
        generation = Generation(self, str(next(self._ids)), prompt, params, bell)

        def add() -> None:
            generation.request = self.engine.add(generation.request_id, prompt, params, tag=generation)
            if streamed:
                self._followed[generation.request_id] = generation

        self.thread.post(add).add_done_callback(lambda added: self._note(generation, added))
        self._open[generation.request_id] = generation
        if streamed:
            self._streamed.add(generation)
        self.num_held += params.n
        return generation

    def check(self) -> None:
        """Raises WorkerError when the engine failed."""
        if self.thread.failure is not None:
            raise self.thread.failure

    def end(self, reason: str) -> None:
        """All requests end with what they have, and none is taken any more."""
        self._over = reason
        for generation in self._open.values():
            generation.expire(reason)

    def close(self) -> None:
        """Stops the engine; whoever still waits gets a WorkerError."""
        self.thread.close()

    # On the event loop

    def _close(self, generation: Generation) -> None:
        self._open.pop(generation.request_id, None)
        self._streamed.discard(generation)
        if not generation.finished and self.thread.failure is None:
            self._abort(generation, "its client went away")
        self._uncount(generation)

    def _abort(self, generation: Generation, reason: str) -> None:
        def abort() -> None:
            aborted = self.engine.abort(generation.request_id)
            for sequence in aborted:
                sequence.error = reason
            self._collect(aborted)

        try:
            self.thread.post(abort).add_done_callback(lambda aborted: self._note(generation, aborted))
        except WorkerError:  # the engine is gone, and every request with it
            self._ring()

    def _uncount(self, generation: Generation) -> None:
        if generation._counted:
            generation._counted = False
            self.num_held -= generation.params.n

    def _tell(self) -> None:
        self._rung = False
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        for generation in ended:
            self._uncount(generation)
            self._on_end(generation)
        told: Iterable[Generation] = [*ended, *self._streamed]
        for generation in self._open.values() if self.thread.failure is not None else told:
            generation.bell.set()

    # On the engine's thread

    def _collect(self, finished: list[Sequence]) -> None:
        for sequence in finished:
            generation: Generation = sequence.request.tag
            generation.ended.add(sequence.sample_index)
            if generation.finished:
                self._followed.pop(generation.request_id, None)
                self._ended.append(generation)
        self._ring()

    def _after_step(self) -> None:
        for generation in self._followed.values():
            generation.ready = [len(s.raw_logprobs) for s in generation.sequences]
        if self._followed:
            self._ring()

    def _note(self, generation: Generation, done: Future[None]) -> None:
        """What went wrong with a command is its request's, or the next wait for it would never end."""
        if (error := done.exception()) is not None:
            generation.failure = WorkerError(str(error))
            self._ended.append(generation)
            self._ring()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._loop.call_soon_threadsafe(self._tell)


async def news(generations: Items[Generation]) -> None:
    """Wait for news of requests that share a bell. Raises WorkerError when one of them will never end."""
    bell = generations[0].bell
    await bell.wait()
    bell.clear()
    for generation in generations:
        generation.check()


async def ends(generations: Items[Generation]) -> None:
    """Wait until all are finished. Raises as `news` does."""
    while not all(generation.finished for generation in generations):
        await news(generations)
