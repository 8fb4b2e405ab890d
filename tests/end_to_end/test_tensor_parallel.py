"""A training run whose inference worker is a group of two ranks, one of which dies on the way."""

import os
import signal
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(600)

STEPS = 5


def followers(command: Any) -> list[psutil.Process]:
    return [process for process in command.processes() if "inference.follower" in process.cmdline()]


@pytest.mark.soak
def test_a_group_trains_and_is_replaced_as_one_when_a_follower_dies(command: Any, checks: Any) -> None:
    process = command.start("inference.tensor_parallel=2", "inference.overlap=true", f"run.steps={STEPS}")
    metrics = command.directory / "metrics.jsonl"
    command.wait_for(lambda: metrics.exists() and '"progress/step": 1,' in metrics.read_text(), process)
    (follower,) = followers(command)
    os.kill(follower.pid, signal.SIGKILL)
    command.end(process, code=0)
    command.assert_nothing_left()
    assert command.summary()["exit_reason"] == "finished"
    checks.one_row_a_step(command, STEPS)
    checks.one_fate_each(command)
    checks.canary(command)
    rows = command.rollouts()
    assert {row.worker for row in rows} == {"inference-0", "inference-1"}
    versions = {version for row in rows for version, _, _ in row.version_spans}
    assert len(versions) > 2, "no update reached the ranks, so the canary shows little"
