"""Virtual time: what happens next."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Calls back in the order of time; at one instant, in the order of asking."""

    now: float = 0.0
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _asked: int = 0

    def at(self, time: float, work: Callable[[], None]) -> None:
        assert time >= self.now - 1e-9, f"{time} has passed, it is {self.now}"
        self._asked += 1
        heapq.heappush(self._queue, (max(time, self.now), self._asked, work))

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        self.at(self.now + seconds, work)

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is to come."""
        if not self._queue:
            return False
        self.now, _, work = heapq.heappop(self._queue)
        work()
        return True
