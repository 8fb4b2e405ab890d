"""`olmorl serve` as a process: it starts, drains on SIGTERM, and stands a crowd of clients that come and go."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from inference import LLM, SamplingParams

pytestmark = pytest.mark.timeout(300)

MODEL = str(Path(__file__).parents[2] / "configs" / "quickstart" / "model")
ENGINE = {"max_num_seqs": 16, "kv_cache_tokens": 2048, "threads": 1}


class Process:
    def __init__(self, *options: str, model: str = MODEL, settings: dict[str, int] = ENGINE) -> None:
        engine = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "olmorl", "serve", "--model", model, "--port", "0", *engine, *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.said = ""
        while (match := re.search(r"at (http://\S+)/v1", self.said)) is None:
            line = self.process.stderr.readline()
            assert line, f"ended with {self.process.wait()}: {self.said}"
            self.said += line
        self.url = match[1]

    def end(self, by: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(by)
        _, said = self.process.communicate(timeout=100)
        self.said += said
        return self.process.returncode


@pytest.fixture
def served() -> Iterator[Process]:
    process = Process("--deterministic", "--max-samples", "4096")
    yield process
    process.end(signal.SIGKILL)


def test_sigterm_lets_running_requests_end(served: Process) -> None:
    ask = {"prompt": "1+2=", "n": 40, "max_tokens": 100, "ignore_eos": True, "stream": True}
    address = httpx.URL(served.url)
    with httpx.stream("POST", f"{served.url}/v1/completions", json=ask, timeout=100) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.process.terminate()
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    reasons = [choice["finish_reason"] for event in events for choice in json.loads(event)["choices"]]
    assert reasons.count("length") == 40
    served.process.wait(60)
    assert served.end() == 0 and "draining" in served.said and "Traceback" not in served.said
    with pytest.raises(OSError), socket.create_connection((address.host, address.port or 0)):
        pass


def test_a_second_sigterm_ends_running_requests() -> None:
    """Paused, so that they could not end by themselves; the drain alone would take a minute."""
    server = Process("--api-key", "k")
    try:
        with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}, timeout=100) as client:
            client.post("/pause")
            ask = {"prompt": "1+2=", "max_tokens": 100, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=ask) as stream:
                began = time.monotonic()
                server.process.terminate()
                while "draining" not in server.said:
                    server.said += server.process.stderr.readline()  # type: ignore[union-attr]
                server.process.terminate()
                events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert events.pop() == "[DONE]" and json.loads(events[-1])["choices"][0]["finish_reason"] == "abort"
        assert server.end() == 0 and time.monotonic() - began < 30 and "Traceback" not in server.said
    finally:
        server.end(signal.SIGKILL)


def load_requests() -> list[tuple[dict[str, Any], str]]:
    """(body, the only right answer)"""
    rng = random.Random(1)
    asked = [
        (f"{rng.randint(1, 9)}+{rng.randint(1, 9)}+{rng.randint(1, 9)}=", SamplingParams(seed=seed, max_tokens=60))
        for seed in range(32)
    ]
    llm = LLM(MODEL, **ENGINE, deterministic=True)
    answers = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    return [
        ({"prompt": prompt, "seed": params.seed, "max_tokens": 60}, answer.samples[0].text)
        for (prompt, params), answer in zip(asked, answers, strict=True)
    ]


async def use(client: httpx.AsyncClient, rng: random.Random, requests: list[tuple[dict[str, Any], str]]) -> bool:
    """One request; False if it was given up on the way."""
    body, expected = rng.choice(requests)
    body = body | {"stream": rng.random() < 0.5}
    patience = rng.choice([0.0, 0.01, 0.1, 1.0]) if rng.random() < 0.4 else 200.0
    try:
        async with asyncio.timeout(patience):
            if not body["stream"]:
                reply = await client.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                assert reply.json()["choices"][0]["text"] == expected
                return True
            text = ""
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            assert text == expected
            return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("clients", "seconds"), [(20, 4.0), pytest.param(200, 60.0, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_a_crowd_that_comes_and_goes(served: Process, clients: int, seconds: float) -> None:
    requests = load_requests()
    server = psutil.Process(served.process.pid)
    counts = {True: 0, False: 0}
    sizes: list[int] = []

    async def one(client: httpx.AsyncClient, seed: int, end: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            counts[await use(client, rng, requests)] += 1

    async def main() -> None:
        limits = httpx.Limits(max_connections=clients + 20)
        async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=200) as client:
            for part in range(4):
                end = time.monotonic() + seconds / 4
                await asyncio.gather(*(one(client, clients * part + seed, end) for seed in range(clients)))
                sizes.append(server.memory_info().rss)

    asyncio.run(main())

    def gauges() -> dict[str, float]:
        lines = httpx.get(f"{served.url}/metrics", timeout=60).text.splitlines()
        values = {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "{" in line}
        return {
            name: values[f"vllm:{name}"]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }

    deadline = time.monotonic() + 60
    while any(gauges().values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(gauges().values()), "a slot or a block leaks"
    print(f"{counts[True]} answers, {counts[False]} given up, RSS {[size >> 20 for size in sizes]} MB")
    assert counts[True] > 20 and counts[False] > 5
    assert sizes[-1] - sizes[0] < 32 << 20, sizes
    assert served.end() == 0 and "Traceback" not in served.said


@pytest.mark.soak
@pytest.mark.timed
@pytest.mark.timeout(900)
@pytest.mark.skipif("OLMORL_TEST_MODEL" not in os.environ, reason="OLMORL_TEST_MODEL names no folder of a real model")
def test_http_costs_little(tmp_path: Path) -> None:
    """A load as `olmorl bench engine` runs it, and the same samples asked for at once, each by a request of its own."""
    model, rng = os.environ["OLMORL_TEST_MODEL"], random.Random(0)
    load = [
        {"prompt": prompt, "max_tokens": min(256, int(rng.lognormvariate(4.3, 0.8)) + 1), "group": group}
        for group in range(8)
        for prompt in [[rng.randrange(1000) for _ in range(70)]]
        for _ in range(8)
    ]
    tokens = sum(entry["max_tokens"] for entry in load)
    (tmp_path / "load.json").write_text(json.dumps(load))
    bench = [sys.executable, "-m", "olmorl", "bench", "engine", "--model", model]
    bench += ["--workload", str(tmp_path / "load.json"), "--json", str(tmp_path / "figures.json")]

    async def ask(client: httpx.AsyncClient, seed: int, entry: dict[str, Any]) -> None:
        body = {"prompt": entry["prompt"], "max_tokens": entry["max_tokens"], "ignore_eos": True, "seed": seed}
        reply = await client.post("/v1/completions", json=body)
        assert reply.json()["usage"]["completion_tokens"] == entry["max_tokens"]

    async def serve(url: str) -> float:
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits()) as client:
            await ask(client, 0, {"prompt": [1] * 70, "max_tokens": 4})
            started = time.perf_counter()
            await asyncio.gather(*(ask(client, seed, entry) for seed, entry in enumerate(load)))
            return tokens / (time.perf_counter() - started)

    rates: dict[str, list[float]] = {"bench": [], "http": []}
    for _ in range(2):
        subprocess.run(bench, check=True, capture_output=True)
        rates["bench"].append(json.loads((tmp_path / "figures.json").read_text())["tokens_per_second"])
        process = Process(model=model, settings={})
        rates["http"].append(asyncio.run(serve(process.url)))
        process.end()
    print(rates)
    assert max(rates["http"]) > 0.85 * max(rates["bench"])


def test_what_keeps_it_from_starting(capsys: pytest.CaptureFixture[str]) -> None:
    from olmorl.cli.main import run

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["serve", "--model", MODEL, "--port", str(taken.getsockname()[1])]) == 2
        assert "choose another --port" in capsys.readouterr().err
    for arguments, says in (
        (["--model", "/nowhere"], "/nowhere"),
        (["--model", MODEL, "--host", "1.2.3.4"], "cannot listen"),
        (["--model", MODEL, "--api-key", ""], "--api-key is empty"),
        (["--model", MODEL, "--max-samples", "0"], "--max-samples"),
    ):
        assert run(["serve", "--port", "0", *arguments]) == 2
        assert says in capsys.readouterr().err
