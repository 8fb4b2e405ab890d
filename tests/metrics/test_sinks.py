"""Sinks with the real thing behind them: files, a terminal of rich, and wandb without a network."""

import io
import json
import logging
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from olmorl.config.schema import Config
from olmorl.metrics.console_sink import ConsoleSink
from olmorl.metrics.jsonl_sink import JsonlSink, drop_torn_line, read_metrics
from olmorl.metrics.names import METRIC_NAMES, is_declared
from olmorl.metrics.sinks import open_sinks
from olmorl.metrics.wandb_sink import WandbSink, open_wandb, resolve_mode

History = Callable[[Path], list[dict[str, Any]]]
STEP = {
    "reward/mean": 0.5,
    "throughput/tokens_per_second": 1234.0,
    "off_policy/version_lag_mean": 1.25,
    "time/step": 2.0,
    "time/wait_for_batch": 0.5,
}


def test_jsonl_is_whole_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"reward/mean": 0.5, "loss/policy": math.nan, "optim/grad_norm": math.inf})
    assert path.read_text() == (
        '{"progress/step": 1, "reward/mean": 0.5, "loss/policy": null, "optim/grad_norm": null}\n'
    )
    sink.write(2, {})
    assert [row["progress/step"] for row in read_metrics(path)] == [1, 2]
    sink.close()
    sink.close()


def test_jsonl_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"progress/step": 1}\n{"progress/st')
    assert [row["progress/step"] for row in read_metrics(path)] == [1]
    sink = JsonlSink(path)
    sink.write(2, {})
    sink.close()
    assert [json.loads(line)["progress/step"] for line in path.read_text().splitlines()] == [1, 2]


@given(st.binary(max_size=40), st.integers(0, 3))
def test_only_the_torn_line_is_dropped(tmp_path_factory: pytest.TempPathFactory, tail: bytes, padding: int) -> None:
    path = tmp_path_factory.getbasetemp() / "torn.jsonl"
    data = (b"x" * 4094 * padding + b"\n") * (padding > 0) + tail
    path.write_bytes(data)
    drop_torn_line(path)
    assert path.read_bytes() == data[: data.rfind(b"\n") + 1]


def test_console_without_terminal_prints_few_lines() -> None:
    out = io.StringIO()
    sink = ConsoleSink(1000, console=Console(file=out, width=60))
    for step in range(1, 1001):
        sink.write(step, STEP)
    sink.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 41
    assert lines[0] == "step 1/1000 · reward 0.500 · 1,234 tok/s · lag 1.2 · wait 25% · 2.00 s/step"
    assert lines[-1].startswith("step 1000/1000") and lines[-1].endswith("0:00 left")


def test_console_tells_of_evaluations() -> None:
    out = io.StringIO()
    sink = ConsoleSink(10, console=Console(file=out))
    one = {"eval/a/avg_at_k": 0.5, "eval/a/avg_at_k_stderr": 0.0254, "eval/a/pass_at_k": 0.5}
    another = {"eval/b/avg_at_k": 0.5, "eval/b/avg_at_k_stderr": math.nan, "eval/b/pass_at_k": 0.75}
    sink.write(0, {**one, **another, "eval/b/unscored_fraction": 0.125})
    assert out.getvalue().splitlines() == [
        "eval at step 0: a avg@k 0.500 ± 0.025",
        "eval at step 0: b avg@k 0.500 · pass@k 0.750 · 12.5% without a score",
    ]


def test_the_time_left_does_not_count_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes before the first row, then each step takes two seconds."""
    out = io.StringIO()
    clock = iter([60.0, 62.0, 64.0])
    monkeypatch.setattr("olmorl.metrics.console_sink.time.monotonic", lambda: next(clock))
    sink = ConsoleSink(10, console=Console(file=out))
    sink.write(0, {})
    sink.write(1, STEP)
    sink.write(2, STEP)
    assert [line.rpartition(" · ")[2] for line in out.getvalue().splitlines()] == ["0:18 left", "0:16 left"]


def test_console_on_a_terminal_is_cheap_and_ends_clean() -> None:
    out = io.StringIO()
    sink = ConsoleSink(200, first_step=100, console=Console(file=out, force_terminal=True, width=120))
    seconds = []
    for step in range(101, 201):
        start = time.perf_counter()
        sink.write(step, STEP)
        seconds.append(time.perf_counter() - start)
    sink.close()
    sink.close()
    assert "200/200" in out.getvalue() and "reward 0.500" in out.getvalue()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1, "the cursor comes back"
    assert sorted(seconds)[50] < 0.005


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_narrow_terminal_shows_the_step_the_time_left_and_the_reward(width: int) -> None:
    out = io.StringIO()
    sink = ConsoleSink(2000, console=Console(file=out, force_terminal=True, width=width, color_system=None))
    for step in (1, 2):
        sink.write(step, STEP)
    sink.close()
    last = out.getvalue().split("\x1b[2K")[-1].splitlines()[0]
    assert len(last) <= width and last.startswith("step 2/2000 ") and " left reward 0.500" in last


@pytest.mark.parametrize(
    ("mode", "environment", "resolved"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": "k", "WANDB_MODE": "online"}, "offline"),
    ],
)
def test_wandb_mode(monkeypatch: pytest.MonkeyPatch, mode: str, environment: dict[str, str], resolved: str) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_mode(mode) == resolved  # type: ignore[arg-type]


_WANDB_SCRIPT = """
import sys
from pathlib import Path
from olmorl.metrics.wandb_sink import open_wandb

for attempt, steps in enumerate(((0, 1, 2, 3), (2, 3, 4), (4, 5))):
    sink = open_wandb(Path(sys.argv[1]), project="p", name="n", mode="offline", config={"run": {"seed": 0}})
    for step in steps:
        sink.write_samples(step, {"a": []})
        sink.write(step, {"reward/mean": 0.5, "optim/lr": attempt})
    sink.close()
    sink.close()
assert "torch" not in sys.modules, "wandb brought torch into the driver"
"""


def test_a_resumed_run_goes_on_in_wandb(tmp_path: Path, wandb_history: History) -> None:
    """Both axes only grow, also where an attempt repeats steps of the one before. In a process of its own: wandb leaves
    threads and hooks behind."""
    subprocess.run([sys.executable, "-c", _WANDB_SCRIPT, str(tmp_path)], check=True, timeout=120)
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    runs = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}*"))  # a second one within a second has a suffix
    assert len(runs) == len(list((tmp_path / "wandb").glob("offline-run-*"))) > 0, "another id is another run"
    history = wandb_history(tmp_path)
    assert [(row["progress/step"], row["_step"], row["optim/lr"]) for row in history] == [
        *((step, step, 0) for step in (0, 1, 2, 3)),
        (4, 4, 1),
        (5, 5, 2),
    ]
    assert all("eval/a/samples/_type" in row for row in history)


_KILLED_SCRIPT = """
import os, signal, sys
from pathlib import Path
from olmorl.metrics.jsonl_sink import JsonlSink
from olmorl.metrics.wandb_sink import open_wandb

directory, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rows = JsonlSink(directory / "metrics.jsonl")
sink = open_wandb(directory, project="p", name="n", mode="offline", config={})
for step in range(first, last):
    row = {f"age/{n}/loss": float(step) for n in range(120)} | {"reward/mean": float("nan"), "optim/lr": first}
    rows.write(step, row)
    sink.write(step, row)
if last == 30:
    sink.close()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_wandb_lost_by_a_kill_is_logged_again(tmp_path: Path, wandb_history: History) -> None:
    """It writes block by block: of the ten steps before a kill some are there, of two none is."""
    for first, last in ((0, 10), (10, 12), (12, 20), (20, 30)):
        script = [sys.executable, "-c", _KILLED_SCRIPT, str(tmp_path), str(first), str(last)]
        assert subprocess.run(script, timeout=120).returncode == (0 if last == 30 else -signal.SIGKILL)
        if last == 10:
            before = [row["progress/step"] for row in wandb_history(tmp_path)]
            assert 0 < len(before) < 10, "nothing was lost, or all"
    history = wandb_history(tmp_path)
    assert [(row["progress/step"], row["_step"]) for row in history] == [(step, step) for step in range(30)]
    assert [row["optim/lr"] for row in history] == [*[0] * 10, *[10] * 2, *[12] * 8, *[20] * 10]
    assert all(math.isnan(row["reward/mean"]) for row in history)


_SAMPLES_SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from olmorl.metrics.rollout_log import RolloutRow
from olmorl.metrics.wandb_sink import open_wandb

none = np.zeros(0)
def row(prompt, sample):
    return RolloutRow(
        rollout_id="", prompt_id=f"a/{prompt}", sample=sample, step=3, attempt=1, data_source="a",
        prompt_token_ids=none, token_ids=none, loss_mask=none, logprobs=none, raw_logprobs=none, version_spans=(),
        kv_events=(), text=f"answer {prompt}.{sample}", finish_reason="stop", reward=None if prompt else 1.0,
        verdict="timeout" if prompt else "scored", advantage=None, fate="eval", seed=1, worker="w", t_admitted=0.0,
        t_first_token=0.0, t_finished=0.0, t_trained=None, prompt="1+1=", ground_truth="2", verdict_detail="why",
    )
sink = open_wandb(Path(sys.argv[1]), project="p", name="n", mode="auto", config={})
sink.write_samples(3, {"a": [row(prompt, sample) for prompt in range(40) for sample in range(2)]})
sink.write(3, {"eval/a/avg_at_k": 0.75})
sink.close()
"""


def test_samples_of_evaluations_reach_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_history: History
) -> None:
    """Read back from the run that wandb keeps where there is no key."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    subprocess.run([sys.executable, "-c", _SAMPLES_SCRIPT, str(tmp_path)], check=True, timeout=120)
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    [path] = (run / "files" / "media" / "table" / "eval" / "a").glob("samples_*.table.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
    assert rows[0] == {
        "version": 3,
        "prompt_id": "a/0",
        "prompt": "1+1=",
        "text": "answer 0.0",
        "ground_truth": "2",
        "reward": 1.0,
        "verdict": "scored",
        "verdict_detail": "why",
    }
    assert [row["text"] for row in rows] == [f"answer {prompt}.0" for prompt in range(16)]
    [only] = wandb_history(tmp_path)
    assert only["eval/a/avg_at_k"] == 0.75 and only["progress/step"] == 3
    assert only["eval/a/samples/_type"] == "table-file" and only["eval/a/samples/nrows"] == 16


def test_wandb_that_dies_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Died:
        def define_metric(self, *names: str, **options: str) -> None:
            pass

        def log(self, row: dict[str, float], **options: object) -> None:
            raise ConnectionResetError("its process is gone")

        def finish(self) -> None:
            raise ConnectionResetError("its process is gone")

    sink = WandbSink(Died())  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            sink.write(step, STEP)
        sink.close()
    [told] = [record.message for record in caplog.records]
    assert "its process is gone" in told and "metrics.jsonl" in told


def test_wandb_that_cannot_start_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wandb").write_text("a file where wandb wants a folder")
    with caplog.at_level(logging.WARNING):
        assert open_wandb(tmp_path, project="p", name="n", mode="offline", config={}) is None
    assert "wandb did not start" in caplog.text and "the run goes on" in caplog.text


def test_open_sinks_follows_the_config(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d.jsonl"},
            "logging": {"wandb": "disabled", "console": False},
        }
    )
    sinks = open_sinks(config, tmp_path)
    assert [type(sink) for sink in sinks] == [JsonlSink]
    sinks[0].close()


def test_declared_names() -> None:
    assert len(METRIC_NAMES) == len(set(METRIC_NAMES))
    assert is_declared("reward/mean") and is_declared("reward/gsm8k/mean") and is_declared("eval/held_out/pass_at_k")
    assert not is_declared("reward/meen") and not is_declared("eval/a/b/pass_at_k") and not is_declared("xreward/mean")
