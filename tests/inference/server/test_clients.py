"""Clients that come and go: what they hold is theirs alone, and free as soon as they are gone."""

import io
import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from inference.engine import Engine
from inference.server import connection as connections
from inference.server.app import Server
from inference.server.completions import Completions
from inference.server.options import ServerOptions
from inference.server.serve import HttpServer
from olmorl.contract.generation import EngineConfig

LONG = {"prompt": "1+2=", "max_tokens": 100, "ignore_eos": True}


def raw_request(**body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("pipelined", [1, 2])
def test_who_goes_away_frees_its_slot(running: Any, stream: bool, half: bool, pipelined: int) -> None:
    """The engine stands still, so that the request cannot end by itself."""
    running.server.generations.thread.pause()
    client = running.connect()
    client.sendall(raw_request(**LONG, n=2, stream=stream) * pipelined)
    running.wait_for(lambda: running.engine.requests)
    if half:
        client.shutdown(socket.SHUT_WR)
    else:
        client.close()
    running.assert_idle()
    running.server.generations.thread.resume()
    client.close()
    assert running.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def test_who_goes_away_mid_stream_frees_its_blocks(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = running.engine.stats()["output_tokens"]
    gate = running.gate_steps(monkeypatch, 10)
    with running.client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 4}) as response:
        lines = response.iter_lines()  # kept: a response whose lines nobody holds is closed
        assert next(lines).startswith("data: {")
        gate.wait()
    running.wait_for_command()
    gate.open()
    running.assert_idle()
    assert running.engine.stats()["output_tokens"] - seen <= 11 * 4


def test_a_slow_reader_stalls_nobody(running: Any) -> None:
    """It asked for far more than its connection holds, and reads nothing of it."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        for _ in range(60):  # pipelined: one after the other fills the buffers between us
            slow.sendall(raw_request(**LONG, n=4, stream=True, logprobs=20))
        for _ in range(3):
            assert running.complete(max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    running.assert_idle()


def test_who_never_reads_is_cut_off(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    running = start()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        for _ in range(400):
            try:
                slow.sendall(raw_request(**LONG, n=4, stream=True, logprobs=20))
            except OSError:
                break
            if not running.open_connections:
                break
        running.wait_for(lambda: not running.open_connections)
    running.assert_idle()


def test_who_says_nothing_is_cut_off(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    running = start()
    for beginning in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
        with running.connect() as silent:
            silent.sendall(beginning)
            assert silent.recv(100) == b"", "closed by the server"


def test_many_idle_connections_cost_no_service(running: Any) -> None:
    idle = [running.connect() for _ in range(300)]
    assert running.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    for one in idle:
        one.close()
    running.wait_for(lambda: running.open_connections <= 2)


def test_a_deadline_ends_a_request_with_what_it_has(running: Any) -> None:
    running.server.generations.thread.pause()
    answer = running.complete(**LONG, timeout=0.05, n=2)
    running.server.generations.thread.resume()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "abort" and "deadline of 0.05 s" in choice["error"]
    running.assert_idle()


def test_a_failed_engine_is_told(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits, streams or comes later gets an error at once."""
    running = start()
    thread = running.server.generations.thread
    thread.pause()
    replies: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: replies.append(running.post("/v1/completions", **LONG)))
    waiting.start()
    streaming = httpx.Client(base_url=running.url, timeout=60)
    with streaming.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
        running.wait_for(lambda: len(running.engine.requests) == 2)

        def broken() -> None:
            raise ZeroDivisionError("of all things")

        monkeypatch.setattr(running.engine, "step", broken)
        thread.resume()
        lines = list(stream.iter_lines())
    waiting.join()
    assert "the engine stopped: ZeroDivisionError" in lines[0] and lines[-2] == "data: [DONE]"
    assert replies[0].status_code == 503 and running.post("/v1/completions", **LONG).status_code == 503
    assert running.client.get("/health").status_code == 503
    streaming.close()


def test_who_reads_slowly_gets_it_all(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than the connection holds, and far longer to read than a client may read nothing."""
    stall = 1.0
    monkeypatch.setattr(connections, "STALL_SECONDS", stall)
    running = start(engine={"max_num_seqs": 64, "kv_cache_tokens": 8192})
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        slow.sendall(raw_request(**LONG, n=200, logprobs=20, stream=False))
        head, _, first = slow.recv(1 << 20).partition(b"\r\n\r\n")
        began = time.monotonic()
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        body = bytearray(first)
        while len(body) < length and (part := slow.recv(1 << 20)):
            body += part
            time.sleep(max(0.0, began + 6 * stall * len(body) / length - time.monotonic()))
        seconds = time.monotonic() - began
    assert len(json.loads(body)["choices"]) == 200 and seconds > 5 * stall
    running.assert_idle()


def test_what_is_not_drained_in_time_ends_with_what_it_has(start: Callable[..., Any]) -> None:
    running = start(drain_seconds=0.2)
    running.server.generations.thread.pause()
    replies: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: replies.append(running.post("/v1/completions", **LONG, n=2)))
    waiting.start()
    with (
        httpx.Client(base_url=running.url, timeout=60) as streaming,
        streaming.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream,
    ):
        running.wait_for(lambda: len(running.engine.requests) == 2)
        running._http.should_exit = True
        lines = [line for line in stream.iter_lines() if line]
    waiting.join()
    assert lines.pop() == "data: [DONE]" and replies[0].status_code == 200
    choices = replies[0].json()["choices"] + json.loads(lines[-1].removeprefix("data: "))["choices"]
    assert [(c["finish_reason"], c["error"]) for c in choices] == [("abort", "the server is stopped")] * 3


def test_who_is_ended_while_it_starts_serves_nobody(
    chat_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ended(completions: Completions) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Completions, "warm_up", ended)
    server = Server(Engine(EngineConfig(model=chat_folder, kv_cache_tokens=64, threads=1)), ServerOptions())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        HttpServer(server, on_start="serving").run(sockets=[listener])
    said = capsys.readouterr().err
    assert said.startswith("draining") and "serving" not in said


def test_a_second_signal_while_the_first_speaks_counts(chat_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between any two lines of the first one's handler."""
    said: list[str] = []
    ends: list[int] = []

    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            said.append(text)
            if len(said) == 1:
                signal.raise_signal(signal.SIGTERM)
            return len(text)

    async def ended(completions: Completions) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", Interrupted())
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Completions, "warm_up", ended)
    monkeypatch.setattr(HttpServer, "_end_requests", lambda server: ends.append(1))
    server = Server(Engine(EngineConfig(model=chat_folder, kv_cache_tokens=64, threads=1)), ServerOptions())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        HttpServer(server, on_start="serving").run(sockets=[listener])
    assert ends == [1] and "".join(said).count("draining") == 1
