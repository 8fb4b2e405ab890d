"""One HTTP connection, and what it may cost: uvicorn's protocol with bounds that a hostile client cannot stretch.

A request head must come whole within `HEAD_SECONDS` and `HEAD_BYTES`; a client that reads nothing of its answer for
`STALL_SECONDS` is cut off. Until then it holds its own connection up and nothing else.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 30.0
HEAD_BYTES = 64 << 10
STALL_SECONDS = 60.0


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._serving: RequestResponseCycle | None = None
        self._in_head = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._serving is not None and not self._serving.response_complete:
            self._serving.disconnected = True
            self._serving.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """A pipelined request becomes uvicorn's `cycle` while an earlier one is served: that one must hear of the end
        of the connection too."""
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """What came in one piece with the beginning of a head is bounded by the transport; the rest is counted."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.send_400_response("The request head is too large.")
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().resume_writing()

    def _expect_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _expect_reading(self) -> None:
        """For as long as the answer waits for its reader, and he takes some of it each time."""
        waiting = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < waiting:
                self._expect_reading()
            else:
                self.transport.abort()

        self._stall_timer = self.loop.call_later(STALL_SECONDS, look)

    def _disarm(self) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
