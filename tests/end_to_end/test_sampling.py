"""Real runs of what decides which samples are drawn and trained: environments, starvation, mixed sources."""

import json
import os
import re
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmorl.cli.main import run as cli
from olmorl.config.load import load_config
from olmorl.contract.generation import OBSERVED
from olmorl.controller.compose import load_inputs
from olmorl.data.stream import PromptStream

CALL = re.compile(r"(?<!\d)(\d{1,9}(?:\+\d{1,9})+)=(\d+);")  # what was asked of the calculator, and its answer

pytestmark = pytest.mark.timeout(600)  # several runs in one test, on whatever machine


def test_an_environment_is_trained(command: Any, checks: Any) -> None:
    """The calculator's numbers are read and not trained; versions, seeds and the books stay exact across turns (a run
    whose books do not close fails)."""
    steps = 5
    command.run(f"run.steps={steps}", "rollout.environment=calculator", "rollout.async_steps=2", "checkpoint.every=4")
    checks.one_row_a_step(command, steps)
    checks.one_fate_each(command)
    checks.canary(command)
    rows = command.rollouts()
    turns = 0
    for row in rows:
        ends = [0, *(end for *_, end in row.version_spans)]
        assert ends[:-1] == [start for _, start, _ in row.version_spans] and ends[-1] == len(row.token_ids)
        for version, start, end in row.version_spans:
            assert version == OBSERVED or 0 <= version < row.step
            assert row.loss_mask[start:end].all() == (version != OBSERVED and row.fate == "trained")
            assert version != OBSERVED or not (row.loss_mask[start:end].any() or row.logprobs[start:end].any())
            turns += version == OBSERVED
        for left, right in CALL.findall(row.text):
            assert sum(map(int, left.split("+"))) == int(right), row.text
    assert turns > 2 * len(rows) / 3, "the calculator was hardly asked"
    summary = command.summary()
    drawn = sum(int(row.loss_mask.sum()) for row in rows)
    assert drawn == summary["trained_tokens"] == summary["waste"]["trained"]
    assert all(np.isfinite(row["loss/policy"]) for row in command.metrics()[1:])
    chatty = max(rows, key=lambda row: [version for version, *_ in row.version_spans].count(OBSERVED))
    fresh = max(rows, key=lambda row: len({version for version, *_ in row.version_spans}))
    for row in (chatty, fresh):
        assert cli(["replay", str(command.directory), row.rollout_id]) == 0, "a turn came out otherwise"


STARVED = (
    "logging.wandb=offline",
    "data.train=eight.jsonl",
    "checkpoint.every=100",
    "eval.data=[]",
    "rollout.async_steps=0",
)


def starve(command: Any) -> int:
    """Trains eight prompts, retired as soon as one sample is right; returns the last step. checkpoint.every is far."""
    sums = [f"{a}+{b}+5+4+9=" for a, b in ((1, 2), (3, 4), (5, 6), (7, 8), (9, 1), (2, 3), (4, 5), (6, 7))]
    rows = [{"prompt": s, "answer": str(sum(map(int, s[:-1].split("+"))))} for s in sums]
    (command.folder / "eight.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules = ("rollout.no_resampling_pass_rate=0.01", "rollout.starvation_patience=4")
    _, err = command.run("run.steps=50", *STARVED, *rules, code=1)
    assert "is retired" in err or "no batch of 4 groups with signal can be filled" in err, err
    assert "Traceback" not in err
    reason, step = command.summary()["exit_reason"], command.summary()["steps"]
    assert reason.startswith("failed: ") and 1 <= step < 50
    return step


@pytest.mark.soak
def test_a_starved_run_stops_with_its_checkpoint_and_can_go_on(command: Any, checks: Any, wandb_history: Any) -> None:
    step = starve(command)
    assert (command.directory / "checkpoints" / f"step_{step:06d}" / "COMPLETE").exists()
    assert command.metrics()[-1]["active_sampling/retired_prompts"] > 0
    command.assert_nothing_left()
    command.run(f"run.steps={step + 1}", *STARVED, "--resume")
    assert [row["progress/step"] for row in wandb_history(command.directory)] == list(range(step + 2))
    assert len({path.name.rpartition("-")[2] for path in command.directory.glob("wandb/offline-run-*")}) == 1
    checks.one_row_a_step(command, step + 1)
    checks.one_fate_each(command)


def break_verifier(command: Any, *settings: str) -> str:
    """A run with it; what it says last."""
    (command.folder / "boom.py").write_text("def judge(completion, truth, prompt):\n    return float('x' + truth)\n")
    _, err = command.run("reward.verifier=boom:judge", *settings, code=1)
    said = err.splitlines()[-1]
    assert said.startswith("error: the verifier fails: ") and "boom:judge (reward.verifier)" in said, err
    assert "could not convert string to float: 'x" in said and f"({command.folder}/boom.py:2)" in said
    assert "Traceback" not in err and command.summary()["exit_reason"] == said.replace("error:", "failed:")
    log = (command.directory / "logs" / "attempt_1" / "driver.log").read_text()
    assert log.count("Traceback") == 1 and "in judge" in log
    summary, received = command.summary(), (command.directory / "logs" / "received_tokens").read_text()
    assert sum(summary["waste"].values()) - summary["waste"]["lost"] == int(received), "the books are open"
    command.assert_nothing_left()
    return said


def test_a_verifier_that_fails_at_everything_ends_the_run(
    command: Any, checks: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and what it failed at can be read and is accounted for; mended, the run goes on."""
    assert "all samples of the first 8 groups of data source 'chain_sums'" in break_verifier(command, "eval.data=none")
    rows, summary = command.rollouts(), command.summary()
    assert len(rows) >= 32 and {(row.step, row.verdict, row.fate) for row in rows} == {(1, "error", "error")}
    assert summary["waste"]["error"] == sum(len(row.token_ids) for row in rows) > 0
    monkeypatch.setenv("COLUMNS", "300")  # the path of a test's folder is long
    assert cli(["inspect", str(command.directory), "--limit", "1"]) == 0 and "boom.py:2" in capsys.readouterr().out
    mended = "import zlib\ndef judge(completion, truth, prompt):\n    return zlib.crc32(completion.encode()) % 2\n"
    (command.folder / "boom.py").write_text(mended)
    command.run("run.steps=1", "reward.verifier=boom:judge", "eval.data=none", "--resume")
    checks.one_row_a_step(command, 1)
    checks.one_fate_each(command)
    assert command.summary()["waste"]["rolled_back"] >= summary["waste"]["error"]


@pytest.mark.soak
def test_a_verifier_that_fails_at_the_first_evaluation_ends_the_run(command: Any) -> None:
    assert "all 16 samples of evaluation set 'heldout'" in break_verifier(command)
    assert {row["progress/step"] for row in command.metrics()} == {0} and command.summary()["waste"]["eval"] > 0


@pytest.mark.soak
def test_three_mixed_sources_go_on_in_the_same_order_after_a_kill_in_mid_epoch(
    tmp_path: Path, command_in: Callable[[Path], Any]
) -> None:
    """In every step the prompts that an uninterrupted run trains there, and these are the stream's."""

    def sums(name: str, count: int, first: int) -> None:
        texts = [f"{first}+{i % 9 + 1}+{i // 9 + 1}+3+2=" for i in range(count)]
        rows = [{"prompt": t, "answer": str(sum(map(int, t[:-1].split("+"))))} for t in texts]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    for number, count in enumerate((17, 11, 5), start=1):
        sums(f"{number}.jsonl", count, number)
    sources = ", ".join(
        f'{{path = "{tmp_path}/{n}.jsonl", weight = {w}, name = "s{n}"}}' for n, w in ((1, 1), (2, 2), (3, 1))
    )
    settings = (
        "run.steps=12",
        f"data.train=[{sources}]",
        "rollout.active_sampling=false",
        "rollout.async_steps=0",
        "checkpoint.every=1",
        "eval.data=[]",
        "checkpoint.export=false",
    )

    def prompts(command: Any) -> list[set[str]]:
        rows = command.rollouts()
        return [{row.prompt_id for row in rows if row.step == step} for step in range(1, 13)]

    whole, cut = (command_in(tmp_path / name) for name in ("whole", "cut"))
    for command in (whole, cut):
        command.folder.mkdir()
    whole.run(*settings)
    process = cut.start(*settings)
    cut.wait_for((cut.directory / "checkpoints" / "step_000005" / "COMPLETE").exists, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    cut.run(*settings, "--resume")
    assert {row.attempt for row in cut.rollouts()} == {1, 2}
    assert prompts(cut) == prompts(whole)
    inputs = load_inputs(load_config(whole.config, [*whole.small, *settings]))
    stream = PromptStream(inputs.train, seed=0)
    assert 5 * 4 % stream.prompts_per_epoch, "the kill is at an epoch's edge"
    served = [stream.next().prompt_id for _ in range(12 * 4)]
    ids = iter(served)
    assert prompts(whole) == [set(islice(ids, 4)) for _ in range(12)]
    assert {row.data_source for row in cut.rollouts()} == {"s1", "s2", "s3"}
