"""A run directory written by the writers of a run, and a browser that looks at its page."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from olmorl.metrics.jsonl_sink import JsonlSink
from olmorl.metrics.ledger import BINS
from olmorl.metrics.names import METRIC_NAMES
from olmorl.metrics.rollout_log import RolloutRow, write_rollouts
from olmorl.metrics.timeline import Timeline
from olmorl.metrics.utilization import Peak

NOW = 1_800_000_000.0


def a_sample(step: int, prompt: int, sample: int, rng: np.random.Generator) -> RolloutRow:
    length = int(rng.integers(2, 30))
    cut = int(rng.integers(1, length))
    newest = step - 1
    spans = ((newest - 1, 0, cut), (newest, cut, length)) if newest > 0 else ((newest, 0, length),)
    trained = sample % 4 != 3
    logprobs = -rng.random(length).astype(np.float32)
    learner = logprobs + rng.normal(0, 0.3, length).astype(np.float32)
    return RolloutRow(
        rollout_id=f"0-{step}-{prompt}_{sample}",
        prompt_id=f"0-{step}-{prompt}",
        sample=sample,
        step=step,
        attempt=1,
        data_source="sums",
        prompt_token_ids=np.arange(1, 6, dtype=np.int32),
        token_ids=rng.integers(1, 9, length).astype(np.int32),
        loss_mask=np.full(length, trained),
        logprobs=logprobs,
        raw_logprobs=-rng.random(length).astype(np.float32),
        version_spans=spans,
        kv_events=((0, spans[0][0], "prefill"),),
        text="<b>not markup</b>",
        finish_reason="length" if sample == 0 else "stop",
        reward=float(sample % 2),
        verdict="scored",
        advantage=0.5 if trained else None,
        fate="trained" if trained else "surplus",
        seed=7,
        worker="inference-0",
        t_admitted=NOW,
        t_first_token=NOW + 1,
        t_finished=NOW + 2,
        t_trained=NOW + 3 if trained else None,
        ground_truth='"6"',
        verdict_detail="<i>says</i> 6",
        learner_logprobs=learner if trained else np.zeros(0, np.float32),
    )


def an_answer(version: int, prompt: int, rng: np.random.Generator) -> RolloutRow:
    """Of an evaluation: the ids are the same at every version."""
    row = a_sample(version, prompt, 0, rng)
    name = f"heldout/0_{prompt}"
    spans = ((version, 0, len(row.token_ids)),)
    return replace(
        row, rollout_id=f"{name}_0", prompt_id=name, data_source="heldout", fate="eval", version_spans=spans,
        kv_events=((0, version, "prefill"),),
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    def make(folder: Path, *, steps: int, rollouts: int = 3, summary: bool = True, noise: float = 0.0) -> Path:
        rng = np.random.default_rng(steps)
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text('[model]\npath = "nowhere"\n')
        sink = JsonlSink(folder / "metrics.jsonl")
        for step in range(1, steps + 1):
            sink.write(step, {name: value * (1 + noise * rng.random()) for name, value in metrics_of(step).items()})
        sink.close()
        for step in range(max(1, steps - rollouts + 1), steps + 1):
            rows = [a_sample(step, prompt, sample, rng) for prompt in range(3) for sample in range(4)]
            write_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet", rows)
        for version in (0, steps):
            rows = [an_answer(version, prompt, rng) for prompt in range(2)]
            write_rollouts(folder / "evals" / f"step_{version:06d}.parquet", rows)
        (folder / "timeline.jsonl").touch()
        write_timeline(folder / "timeline.jsonl")
        if summary:
            (folder / "summary.json").write_text(json.dumps({"exit_reason": "finished"}))
        return folder

    return make


def metrics_of(step: int) -> dict[str, float]:
    """Every declared metric, with some value."""
    values = {
        name.replace("<source>", "sums").replace("<set>", "heldout").replace("<n>", "0"): 0.5 for name in METRIC_NAMES
    }
    values |= {f"waste/{bin}": float(10 + number) for number, bin in enumerate(BINS)}
    values |= {"reward/mean": step / 1000, "time/step": 2.0, "time/wait_for_batch": 1.5}
    del values["progress/step"]
    return values


def write_timeline(path: Path) -> None:
    timeline = Timeline(path, peak=Peak(flops=100.0, bandwidth=10.0), started=NOW)
    for second in range(1, 40):
        wall = second - 0.5
        counters = {
            "wall_seconds": wall,
            "busy_seconds": 0.6 * wall,
            "prefill_seconds": 0.1 * wall,
            "stall_seconds": 0.01 * wall,
            "output_tokens": 100.0 * second,
            "flops": 10.0 * second,
            "bytes": 5.0 * second,
            "updates": float(second // 10),
            "running": float(second % 7),
            "kv_usage": 0.3,
            "version": float(second // 10),
        }
        learner = {"training": 0.25 * second, "waiting": 0.7 * second, "sending": 0.05 * second}
        timeline.write({"inference-0": counters, "inference-1": counters}, learner, now=NOW + second)
    timeline.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Start the real command on run directories; its address."""
    started: list[subprocess.Popen[str]] = []

    def start(*runs: Path) -> str:
        command = [sys.executable, "-m", "olmorl", "dashboard", *map(str, runs), "--port", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        said = process.stderr.readline()
        assert "http://127.0.0.1:" in said, said + process.stderr.read()
        address = said.split("http://")[1].split()[0]
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"http://{address}/", timeout=5)
                return f"http://{address}"
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the page does not answer"

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="module")  # its event loop is this thread's while it lives
def browser() -> Iterator[Any]:
    """Headless Chromium, the system's."""
    chromium = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if chromium is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()
