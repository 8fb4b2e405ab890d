"""Where a run gives up, it says why and keeps its checkpoint; what verifiers do of themselves never ends it."""

import os
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]

STEPS = 4


def reach_a_checkpoint(stage: Any, *settings: str) -> None:
    """One step is done, and its checkpoint is complete."""
    stage.reach("after", *settings)
    stage.wait_for((stage.command.directory / "checkpoints" / "latest").exists)


def assert_stopped_with_checkpoint(stage: Any, checks: Any, message: str) -> None:
    """One clear message, exit code 1, nothing left running; and the run can be continued."""
    stage.end(code=1)
    said = stage.command.err.splitlines()[-1]
    assert said.startswith("error: ") and message in said, stage.command.err
    assert "Traceback" not in stage.command.err
    stage.command.assert_nothing_left()
    assert stage.command.summary()["exit_reason"].startswith("failed: ")
    assert (stage.command.directory / "checkpoints" / "latest" / "COMPLETE").exists()
    stage.open_gate()
    stage.resume("cluster.min_inference_workers=1", "cluster.max_restarts=8")
    checks.invariants(stage.command, STEPS)


def test_too_few_engines_are_left(stage: Any, checks: Any) -> None:
    reach_a_checkpoint(stage, "cluster.max_restarts=0", "cluster.min_inference_workers=2")
    stage.strike("inference-0", signal.SIGKILL)
    assert_stopped_with_checkpoint(
        stage, checks, "1 inference workers are left after 0 restarts, fewer than cluster.min_inference_workers = 2"
    )


def test_with_fewer_engines_than_it_began_with_a_run_goes_on(stage: Any, checks: Any) -> None:
    stage.reach("after", "cluster.max_restarts=0")
    stage.strike("inference-0", signal.SIGKILL)
    stage.leave("after")
    stage.end()
    checks.invariants(stage.command, STEPS)
    assert {row.worker for row in stage.command.rollouts() if row.step > 2} == {"inference-1"}


def test_an_engine_that_dies_again_and_again(stage: Any, checks: Any) -> None:
    reach_a_checkpoint(stage, "cluster.max_restarts=2", "inference.workers=1")
    for number in range(3):
        stage.strike_when_there(f"inference-{number}", signal.SIGKILL)
    assert_stopped_with_checkpoint(stage, checks, "0 inference workers are left after 2 restarts")


def test_both_engines_at_once(stage: Any, checks: Any) -> None:
    stage.reach("before")
    for target in ("inference-0", "inference-1"):
        stage.strike(target, signal.SIGKILL)
    stage.leave("before")
    stage.end()
    checks.invariants(stage.command, STEPS)
    assert stage.command.metrics()[-1]["faults/worker_restarts"] == 2
    assert stage.command.metrics()[-1]["faults/prompts_reissued"] > 0


def test_a_learner_that_is_lost_again_and_again(stage: Any, checks: Any) -> None:
    """With no attempt left the run ends; --resume has new ones."""
    reach_a_checkpoint(stage, "cluster.max_run_restarts=0")
    stage.strike("learner-0", signal.SIGKILL)
    assert_stopped_with_checkpoint(stage, checks, "learner-0 died during ")


@pytest.mark.parametrize("told", ["the driver", "its process group"])
def test_a_run_that_finds_no_signal_ends_at_a_polite_kill(stage: Any, told: str) -> None:
    """It rolls out for ever; SIGTERM is a Ctrl-C, and all is over in seconds, also when Ray was told to end too."""
    (stage.command.folder / "never.py").write_text("def judge(completion, truth, prompt):\n    return 0\n")
    stage.start("reward.verifier=never:judge", "rollout.async_steps=2")
    stage.wait_for(lambda: stage.command.has_row(0))
    stage.wait_for_words("no batch can be filled")
    started = time.monotonic()
    if told == "the driver":
        stage.strike("driver", signal.SIGTERM)
    else:
        os.killpg(stage.process.pid, signal.SIGTERM)
    stage.end(code=130)
    assert stage.command.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in stage.command.err and "Error" not in stage.command.err, stage.command.err
    assert time.monotonic() - started < 30
    stage.command.assert_nothing_left()


def test_verifiers_that_hang_crash_and_raise(stage: Any, checks: Any) -> None:
    """Each costs the sample that it was asked about and no other."""
    source = """
import os, tempfile, time, zlib
from pathlib import Path
HERE = Path(__file__).parent
def judge(completion, truth, prompt):
    if ";" not in completion:
        return 0  # no sample but a truth, which is looked at before the run
    for lot in ("hangs", "crashes", "raises"):  # the fate of the first sample that finds it, and of its like
        with tempfile.NamedTemporaryFile("w", dir=HERE) as mine:
            mine.write(prompt + completion)
            mine.flush()
            try:
                os.link(mine.name, HERE / lot)
            except FileExistsError:
                pass
        if (HERE / lot).read_text() == prompt + completion:
            if lot == "hangs":
                time.sleep(3600)
            if lot == "crashes":
                os.kill(os.getpid(), 9)
            raise RuntimeError("no idea")
    return zlib.crc32(completion.encode()) % 2
"""
    (stage.command.folder / "moody.py").write_text(source)
    stage.start("reward.verifier=moody:judge", "reward.timeout_seconds=1", "rollout.active_sampling=false")
    stage.end()
    checks.invariants(stage.command, STEPS)
    assert all((stage.command.folder / lot).exists() for lot in ("hangs", "crashes", "raises"))
    rows = stage.command.rollouts()
    assert {row.verdict for row in rows} == {"scored", "timeout", "error"}  # also of those that crashed twice
    assert {row.fate for row in rows if row.verdict != "scored"} == {"error"}
    assert "verdict 'timeout'" in stage.command.err and "no idea" in stage.command.err
