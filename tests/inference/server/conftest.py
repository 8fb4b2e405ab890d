"""A real server over the tiny model, on a thread of this process, so that its engine can be looked at."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from inference.engine import Engine
from inference.server.app import Server
from inference.server.options import ServerOptions
from inference.server.serve import HttpServer
from olmorl.contract.generation import EngineConfig

# In characters of the tiny tokenizer: a and b for who speaks, - for the end of a turn.
CHAT_TEMPLATE = (
    "{% if tools %}{{ 'c' }}{% endif %}"
    "{% for m in messages %}{{ 'a' if m.role == 'user' else 'b' }}{{ m.content }}-{% endfor %}"
    "{% if add_generation_prompt %}b{% endif %}"
)


class Gate:
    """Lets so many steps through; the next one waits inside, where the engine takes no command."""

    def __init__(self, step: Callable[[], Any], permits: int) -> None:
        self._step = step
        self._permits = threading.Semaphore(permits)
        self._reached = threading.Event()

    def step(self) -> Any:
        if not self._permits.acquire(blocking=False):
            self._reached.set()
            assert self._permits.acquire(timeout=60)
        return self._step()

    def wait(self) -> None:
        """Until a step waits."""
        assert self._reached.wait(60)

    def open(self) -> None:
        self._permits.release(10**6)


class Running:
    """A server and what a test needs of it."""

    def __init__(self, model: str, options: ServerOptions, **engine: Any) -> None:
        config = {"max_num_seqs": 4, "kv_cache_tokens": 1024, "block_size": 4, "threads": 1, **engine}
        self.server = Server(Engine(EngineConfig(model=model, **config)), options)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = HttpServer(self.server, on_start=f"test server at {self.url}")
        self._thread = threading.Thread(target=self._http.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()
        self.wait_for(lambda: self._http.started)
        headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
        self.client = httpx.Client(base_url=self.url, timeout=60, headers=headers)

    @property
    def engine(self) -> Engine:
        return self.server.engine

    @property
    def open_connections(self) -> int:
        return len(self._http.server_state.connections)

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, prompt: Any = "1+2=", **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, *contents: str, **body: Any) -> dict[str, Any]:
        """Turns of user and assistant."""
        roles = ["user", "assistant"]
        messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
        response = self.post("/v1/chat/completions", messages=messages, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def wait_for(self, what: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def gate_steps(self, monkeypatch: pytest.MonkeyPatch, permits: int) -> "Gate":
        gate = Gate(self.engine.step, permits)
        monkeypatch.setattr(self.engine, "step", gate.step)
        return gate

    def wait_for_command(self) -> None:
        """Until something waits for the end of the engine's step."""
        self.wait_for(lambda: self.server.generations.thread._commands)

    def assert_idle(self) -> None:
        """No request, slot or block is held once all clients are gone."""
        self.wait_for(lambda: not self.engine.requests and self.server.generations.num_held == 0)
        scheduler = self.engine.scheduler
        assert not scheduler.running and not scheduler.waiting
        assert scheduler.allocator.num_free == scheduler.allocator.num_blocks
        assert len(scheduler.free_rows) == scheduler.max_num_seqs
        generations = self.server.generations
        self.wait_for(lambda: not generations._open and not generations._streamed)
        assert not generations._followed

    def stop(self) -> None:
        self.client.close()
        self._http.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def chat_folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    import shutil
    from pathlib import Path

    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    Path(folder, "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return str(folder)


@pytest.fixture(scope="module")
def running(chat_folder: str) -> Iterator[Running]:
    server = Running(chat_folder, ServerOptions(api_key="secret", model_name="tiny", max_samples=64))
    yield server
    server.assert_idle()
    server.stop()


@pytest.fixture
def start(chat_folder: str) -> Iterator[Callable[..., Running]]:
    """Starts a server with options of its own; `engine` are the engine's."""
    servers: list[Running] = []

    def begin(*, engine: dict[str, Any] | None = None, **options: Any) -> Running:
        servers.append(Running(chat_folder, ServerOptions(model_name="tiny", **options), **(engine or {})))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A traceback in the server's log is a bug, whatever the client saw."""
    with caplog.at_level(logging.ERROR):
        yield
    assert not [r.getMessage() for r in caplog.records if r.name == "uvicorn.error" and r.exc_info]
