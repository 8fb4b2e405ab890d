"""A driver that is killed, or stopped by Ctrl-C in any phase: nothing stays behind, and --resume goes on."""

import os
import signal
import subprocess
from typing import Any

import pytest

from olmorl.metrics.names import is_declared
from olmorl.metrics.rollout_log import read_rollouts

pytestmark = pytest.mark.timeout(600)  # several runs in one test, on whatever machine

STEPS = 8
SAMPLES = "eval/heldout/samples/"
EXPECTED = ("step ", "eval at step ", "run directory: ", "400 steps of ", "starting ", "evaluation set ", "peak of ")


def checkpoints(command: Any) -> dict[str, bool]:
    """Name -> whether it is complete."""
    folders = (command.directory / "checkpoints").glob("step_*")
    return {folder.name: (folder / "COMPLETE").exists() for folder in folders}


def test_kill_and_resume(command: Any, checks: Any, wandb_history: Any) -> None:
    settings = [f"run.steps={STEPS}", "checkpoint.every=3", "eval.every=3", "logging.wandb=offline"]
    process = command.start(*settings)
    command.wait_for(lambda: command.has_row(4) and checkpoints(command).get("step_000003", False), process)
    assert len(command.processes()) > 5, "the search for processes finds too few"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # Two helpers of Ray's try for a minute to tell their dead cluster of its end.
    command.assert_nothing_left(but=("ray::DashboardAgent", "ray::RuntimeEnvAgent"))

    _, err = command.run(*settings, "checkpoint.keep=7", "--resume")
    told = "settings that changed since step_000003: checkpoint.keep: 2 -> 7\n"
    assert err.count(told) == 1 and told in (command.directory / "logs" / "attempt_2" / "driver.log").read_text()
    assert command.summary()["exit_reason"] == "finished"
    checks.one_row_a_step(command, STEPS)
    checks.one_fate_each(command)
    checks.canary(command)
    rows = command.rollouts()
    assert {row.attempt for row in rows if row.step <= 3} == {1}
    assert {row.attempt for row in rows if row.step > 3} == {2}
    assert (command.directory / "attempt_1" / "rollouts" / "step_000004.parquet").exists()
    assert command.summary()["trained_tokens"] == sum(len(r.token_ids) for r in rows if r.fate == "trained")
    evaluated = {file.name: {row.attempt for row in read_rollouts(file)} for file in command.directory.glob("evals/*")}
    assert evaluated == {f"step_{step:06d}.parquet": {1 if step <= 3 else 2} for step in (0, 3, 6, STEPS)}
    assert [row["progress/step"] for row in command.metrics() if "eval/heldout/avg_at_k" in row] == [0, 3, 6, STEPS]
    redone = {(row.prompt_id, row.sample): row for row in rows if row.step > 3}
    seeds = {row.prompt_id: row.seed for row in read_attempt(command, 1)}
    again = [row for row in redone.values() if row.prompt_id in seeds]
    assert again and all(row.seed == seeds[row.prompt_id] for row in again), "another seed for the same occurrence"
    check_curves(command, wandb_history(command.directory))


def check_curves(command: Any, history: list[dict[str, Any]]) -> None:
    """What wandb has of both attempts: one run, with what the kill lost of it, and what was repeated once."""
    runs = [path.name for path in command.directory.glob("wandb/offline-run-*")]
    assert len(runs) == 2 and len({name.split("-")[3] for name in runs}) == 1
    steps = [row["progress/step"] for row in history]
    assert steps == [row["_step"] for row in history] == list(range(STEPS + 1))
    assert [
        name for row in history for name in row if not name.startswith(("_", SAMPLES)) and not is_declared(name)
    ] == []
    promised = {
        "reward/mean",
        "throughput/goodput",
        "engine/slot_waste",
        "time/step",
        "sync/stall_seconds",
        "waste/trained",
    }
    assert all(promised <= row.keys() for row in history if row["progress/step"] > 0)


@pytest.mark.soak
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(command: Any, checks: Any) -> None:
    process = command.start("run.steps=400", "checkpoint.every=1", "checkpoint.keep=3")
    command.wait_for(lambda: set(checkpoints(command).values()) == {True, False}, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    newest = max(name for name, complete in checkpoints(command).items() if complete)
    step = int(newest.removeprefix("step_"))

    command.run(f"run.steps={step + 2}", "checkpoint.every=1", "--resume")
    assert checkpoints(command)[f"step_{step + 2:06d}"] and all(checkpoints(command).values())
    checks.one_row_a_step(command, step + 2)
    checks.one_fate_each(command)
    assert {row.attempt for row in command.rollouts() if row.step > step} == {2}


def read_attempt(command: Any, attempt: int) -> list[Any]:
    files = sorted((command.directory / f"attempt_{attempt}" / "rollouts").glob("*.parquet"))
    return [row for file in files for row in read_rollouts(file)]


@pytest.mark.soak
def test_ctrl_c_in_every_phase_and_resume(command: Any, checks: Any) -> None:
    settings = ["run.steps=400", "checkpoint.every=2"]

    def starting_ray() -> bool:
        return any("gcs_server" in " ".join(p.cmdline()) for p in command.processes())

    def writing_a_checkpoint() -> bool:
        here = command.directory / "logs" / "attempt_3" / "learner-0.log"  # else it is the one of an earlier attempt
        return here.exists() and set(checkpoints(command).values()) == {True, False}

    def terminate(process: subprocess.Popen[bytes]) -> None:
        process.terminate()  # a polite kill is a Ctrl-C

    phases = [
        (starting_ray, command.interrupt),
        (lambda: command.has_row(2), terminate),
        (writing_a_checkpoint, command.interrupt),
    ]
    for attempt, (phase, stop) in enumerate(phases, start=1):
        resume = ["--resume"] if attempt > 1 else []
        process = command.start(*settings, *resume)
        command.wait_for(phase, process)
        stop(process)
        _, err = command.end(process, code=130)
        *others, stands, last = err.splitlines()
        newest = max((name for name, complete in checkpoints(command).items() if complete), default="begins anew")
        assert newest in stands and "--resume" in stands and last == "interrupted", err
        noise = [line for line in others if not line.startswith(EXPECTED)]
        assert [line for line in noise if line.strip()] == [], err
        command.assert_nothing_left()
    summary = command.summary()
    assert summary["exit_reason"] == "interrupted"
    assert summary["eval_before"] is not None and summary["eval_after"] is None, "no later version was evaluated"
    newest = max(name for name, complete in checkpoints(command).items() if complete)
    steps = int(newest.removeprefix("step_")) + 2

    command.run(f"run.steps={steps}", "checkpoint.every=2", "--resume")
    command.assert_nothing_left()
    assert all(checkpoints(command).values())
    checks.one_row_a_step(command, steps)
    checks.one_fate_each(command)
    checks.canary(command)
