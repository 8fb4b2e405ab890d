"""How the loops wake each other."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Changed:
    """Something changed: whoever waits looks again. All on one event loop, so nothing changes between the look and
    the wait."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, look: Callable[[], T | None]) -> T:
        """Look after every change until there is something to return (anything true)."""
        while not (found := look()):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return found
