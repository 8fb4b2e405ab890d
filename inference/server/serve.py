"""`olmorl serve`: load the model, listen, and stop gracefully."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn

from inference.engine import Engine
from inference.server.app import Server
from inference.server.connection import Connection
from inference.server.options import ServerOptions
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, SamplingParams

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
LAST_SECONDS = 5.0  # in which clients are to read how their request ended
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(config: EngineConfig, options: ServerOptions) -> None:
    """Until SIGTERM or Ctrl-C: see `HttpServer`."""
    listener = _bind(options)
    with contextlib.closing(listener):
        _raise_file_limit()
        host, port = listener.getsockname()[:2]
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        engine = Engine(config)
        warm_up(engine)
        server = Server(engine, options)
        HttpServer(server, on_start=f"serving {server.model} at {where}/v1 (Ctrl-C ends)").run(sockets=[listener])


def warm_up(engine: Engine) -> None:
    """Compile what the first request would otherwise wait for."""
    engine.add("warm-up", [0], SamplingParams(n=2, max_tokens=2, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()


class HttpServer(uvicorn.Server):
    """uvicorn with our connections. It drains on a signal, or when `should_exit` is set.

    Then no new request is taken, and running ones go on: for `drain_seconds`, or until a second signal. What is left of
    them ends with what it has.
    """

    def __init__(self, server: Server, *, on_start: str) -> None:
        super().__init__(
            uvicorn.Config(
                server.app(),
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._server = server
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            print(self._on_start, file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drained = self._loop.call_later(self._server.options.drain_seconds, self._end_requests)
        await super().shutdown(sockets)
        drained.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises a signal again once it has obeyed it, and a drained server would look interrupted."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first, self.should_exit = not self.should_exit, True  # a second may come while the first speaks
        if first:
            print("draining: running requests end, no new ones are taken", file=sys.stderr, flush=True)
        else:
            self._loop.call_soon_threadsafe(self._end_requests)

    def _end_requests(self) -> None:
        self._server.generations.end("the server is stopped")
        self._loop.call_later(LAST_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _bind(options: ServerOptions) -> socket.socket:
    """Before the model is loaded, so that a port in use costs no wait; connections are taken only once it is."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {options.host} port {options.port}: {error.strerror or error}; "
            "choose another --port or --host"
        ) from None
    return listener


def _raise_file_limit() -> None:
    """Each connection is an open file, idle ones too."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
