"""`olmorl rollout` as a user runs it: killed and resumed, on one worker or two, the same output as unbroken."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from inference import LLM, SamplingParams
from olmorl.controller.loop import request_seed
from olmorl.data.prompt import Prompt

pytestmark = pytest.mark.timeout(900)

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
# Judges 40 completions and then waits while a file is there: no run ends before it is broken off.
VERIFIER = """
import os, time

calls = 0

def judge(completion, truth, prompt):
    global calls
    calls += 1
    while calls > 40 and os.path.exists(HELD):
        time.sleep(0.01)
    return float(completion.endswith(truth))
"""


class Rollout:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held = folder / "held"
        (folder / "judging.py").write_text(f"HELD = {str(self.held)!r}\n{VERIFIER}")

    def start(self, out: str, *options: str, limit: int = 60) -> subprocess.Popen[str]:
        arguments = [
            "--model",
            str(QUICKSTART / "model"),
            "--prompts",
            str(QUICKSTART / "held_out.jsonl"),
            "--out",
            out,
        ]
        arguments += ["--limit", str(limit), "-n", "4", "--max-tokens", "40", "--max-num-seqs", "8", "--seed", "5"]
        arguments += ["--verifier", "judging:judge", "--deterministic", "--threads", "1", "--verifier-timeout", "200"]
        return subprocess.Popen(
            [sys.executable, "-m", "olmorl", "rollout", *arguments, *options],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            start_new_session=True,
        )

    def run(self, out: str, *options: str, **limits: int) -> str:
        process = self.start(out, *options, **limits)
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        return stdout

    def break_off(self, out: str, *options: str, by: signal.Signals, rows: int) -> str:
        """Once `rows` rows stand; it cannot end by itself before."""
        self.held.touch()
        process = self.start(out, *options)
        path = self.folder / (out if out.endswith(".jsonl") else f".{out}.rows")
        deadline = time.monotonic() + 300
        while not path.exists() or path.read_bytes().count(b"\n") < rows:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if by is signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, by)
        _, stderr = process.communicate(timeout=120)
        self.held.unlink()
        assert process.returncode in (-by, 130)
        return stderr


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: (int(row["prompt_id"].rpartition("_")[2]), row["sample"]))


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert [row["rollout_id"] for row in rows] == [row["rollout_id"] for row in others]
    for row, other in zip(rows, others, strict=True):
        for name in ("token_ids", "text", "finish_reason", "reward", "seed"):
            assert row[name] == other[name], (name, row["rollout_id"])
        assert np.allclose(row["logprobs"], other["logprobs"], atol=1e-4)


@pytest.fixture
def rollout(tmp_path: Path) -> Rollout:
    return Rollout(tmp_path)


def expected_samples(limit: int) -> list[dict[str, Any]]:
    """What `LLM` makes of the same prompts, in this process."""
    rows = [json.loads(line) for line in (QUICKSTART / "held_out.jsonl").read_text().splitlines()[:limit]]
    llm = LLM(QUICKSTART / "model", max_num_seqs=8, deterministic=True, threads=1)
    seeds = [request_seed(5, made_prompt(index)) for index in range(limit)]
    params = [SamplingParams(n=4, max_tokens=40, seed=seed) for seed in seeds]
    return [
        {
            "rollout_id": f"0_{index}_{sample.sample_index}",
            "token_ids": sample.token_ids,
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "reward": float(sample.text.endswith(rows[index]["answer"])),
            "seed": seeds[index],
            "logprobs": sample.logprobs,
        }
        for index, out in enumerate(llm.generate([row["prompt"] for row in rows], params))
        for sample in out.samples
    ]


def made_prompt(index: int) -> Prompt:
    ids = np.zeros(1, np.int32)
    return Prompt(index=index, token_ids=ids, text="", checks=(), data_source="", epoch=0, position=index)


@pytest.mark.soak
def test_killed_and_resumed_on_two_workers(rollout: Rollout) -> None:
    two = ("--workers", "2")
    rollout.break_off("out.parquet", by=signal.SIGKILL, rows=3)
    assert not (rollout.folder / "out.parquet").exists(), "it ended before it was killed"
    summary = rollout.run("out.parquet", *two, "--resume")
    rows, expected = read(rollout.folder / "out.parquet"), expected_samples(60)
    assert_same(rows, expected)
    assert {row["attempt"] for row in rows} == {1, 2}
    assert {row["worker"] for row in rows} == {"inference-0", "inference-1"}
    told = json.loads((rollout.folder / "out.parquet.summary.json").read_text())
    assert told["samples"] == 240 and told["pass_rate"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    assert "pass_rate" in summary and "prompts_by_times_solved" in summary
    second = sum(len(row["token_ids"]) for row in rows if row["attempt"] == 2)
    assert told["this_attempt"]["tokens"] == second < told["tokens"] and "tokens_per_second" not in told
    again = rollout.start("out.parquet", *two)
    assert again.wait(timeout=100) == 2 and "--resume" in again.communicate()[1]


@pytest.mark.soak
def test_interrupted_three_times(rollout: Rollout) -> None:
    rollout.run("whole.jsonl")
    whole = read(rollout.folder / "whole.jsonl")
    for by, rows, options in (
        (signal.SIGINT, 3, ()),
        (signal.SIGKILL, 30, ("--resume", "--workers", "2")),
        (signal.SIGTERM, 60, ("--resume",)),
    ):
        stderr = rollout.break_off("broken.jsonl", *options, by=by, rows=rows)
        assert "Traceback" not in stderr
    rollout.run("broken.jsonl", "--resume", "--workers", "2")
    assert_same(read(rollout.folder / "broken.jsonl"), whole)


@pytest.mark.soak
def test_a_million_prompts_start_at_once_and_take_no_memory(rollout: Rollout) -> None:
    """What lies before the first row, and what stays in memory of a file whose rows name their verifiers."""
    with (rollout.folder / "million.jsonl").open("w") as file:
        for index in range(1_000_000):
            file.write(
                json.dumps({"prompt": f"{index % 10}+{index % 7}=", "answer": "1", "data_source": "gsm8k"}) + "\n"
            )
    started = time.perf_counter()
    process = rollout.start("out.jsonl", "--prompts", "million.jsonl", "--verifier", "gsm8k", limit=1_000_000)
    out = rollout.folder / "out.jsonl"
    seconds, sizes = 0.0, list[int]()
    try:
        while len(sizes) < 20:
            assert process.poll() is None, process.communicate()
            if out.exists() and out.stat().st_size:
                seconds = seconds or time.perf_counter() - started
                sizes.append(psutil.Process(process.pid).memory_info().rss >> 20)
            assert time.perf_counter() - started < 300
            time.sleep(1)
    finally:
        os.killpg(process.pid, signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=120)[1]
    print(f"first row after {seconds:.1f} s, driver {sizes[0]} to {max(sizes)} MB")
    assert seconds < 60 and max(sizes) < 500
