import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

VERIFIERS = '''
import ctypes, os, re, signal, sys, time
import numpy as np
from olmorl.rewards.verdict import Verdict

def echo(completion, ground_truth, prompt):
    return float(completion)

def obey(completion, ground_truth, prompt):
    """Do what the completion says."""
    if completion == "hang":
        while True: pass
    if completion == "hang in C":
        re.fullmatch("(a|a)*b", "a" * 60)
    if completion == "hang without a chance":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    if completion == "exit":
        os._exit(3)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "crash once" and not os.path.exists(ground_truth):
        open(ground_truth, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "raise":
        raise KeyError("lost")
    if completion == "sys.exit":
        sys.exit("bye")
    if completion == "print":
        print("noise" * 1000); sys.stdout.flush(); os.write(1, b"noise")
    if completion == "stdin":
        return len(sys.stdin.read())
    if completion == "spawn":
        import subprocess
        subprocess.Popen(["sleep", "600"])
        open(ground_truth, "w").write(str(os.getpid()))
        while True: pass
    if completion == "fork":
        os.fork()
    if completion == "fork and exit" and not os.fork():
        sys.exit(3)
    if completion == "verdict of numpy":
        return Verdict(status="scored", reward=np.float32(0.5))
    if completion == "verdict of text":
        return Verdict(status="scored", reward="1")
    if completion == "unknown status":
        return Verdict(status="great")
    if completion == "no detail":
        return Verdict(status="error", detail=None)
    if completion == "surrogate":
        raise ValueError(chr(0xDCFF))
    if completion == "modules":
        return sum(name in sys.modules for name in ("torch", "ray", "transformers"))
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1", "true": True, "false": False,
            "numpy bool": np.bool_(True), "numpy": np.float32(0.5), "int": 2}.get(completion, 1.0)

class Judge:
    def __init__(self): self.calls = 0
    def __call__(self, completion, ground_truth, prompt): return 0.25

def two(completion, ground_truth): return 1.0

number = 3
'''


@pytest.fixture
def own_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_verifiers.py").write_text(VERIFIERS)
    (tmp_path / "broken_verifiers.py").write_text("import no_such_library_at_all\n")
    (tmp_path / "failing_verifiers.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "own_verifiers" not in sys.modules
    return "own_verifiers"


class Server:
    """An HTTP server whose answers are `answer(path, body) -> (status, JSON or bytes)`."""

    def __init__(
        self,
        answer: Callable[[str, dict], tuple[int, object]],
        *,
        stall: Callable[[dict], bool] = lambda body: False,
        seconds: float = 0.0,
    ) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict]] = []
        self.headers: dict[str, str] = {}
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._lock:
                    outer._at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer._at_once)
                    outer.requests.append((self.path, body))
                    outer.headers = {name.lower(): value for name, value in self.headers.items()}
                    status, value = outer.answer(self.path, body)
                outer._closing.wait(60 if stall(body) else seconds)
                with outer._lock:
                    outer._at_once -= 1
                payload = value if isinstance(value, bytes) else json.dumps(value).encode()
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    self.send_header("content-length", str(len(payload)))
                    self.end_headers()
                    self.wfile.write(payload)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*args, **options) -> Server:
        servers.append(Server(*args, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
