"""Every process of a run killed, and stopped without a word, before, while and after an update is sent.

Each run ends with all its steps done, and what its directory holds is what an undisturbed run promises.
"""

import signal
import time
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

STEPS = 4
MOMENTS = ("before", "during", "after")
TARGETS = ("inference-0", "inference-1", "learner-0", "driver", "verifier")
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
CASES = [(target, fault, moment) for moment in MOMENTS for target in TARGETS for fault in FAULTS]


TODAY = int(time.time() // 86400)
TODAYS_CASE = CASES[TODAY % len(CASES)]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_run_completes(stage: Any, checks: Any, case: tuple[str, str, str]) -> None:
    the_run_completes(stage, checks, *case)


@pytest.mark.parametrize("case", [TODAYS_CASE], ids="-".join)
def test_a_share_that_changes_by_the_day(stage: Any, checks: Any, case: tuple[str, str, str]) -> None:
    the_run_completes(stage, checks, *case)


def the_run_completes(stage: Any, checks: Any, target: str, fault: str, moment: str) -> None:
    held = moment == "during" and target == "inference-1"  # it is stopped already, which holds the update up
    patience = "cluster.heartbeat_seconds=15" if moment == "during" and not held else "cluster.heartbeat_seconds=6"
    stage.reach(moment, patience)
    if not (held and fault == "stopped"):
        stage.strike(target, FAULTS[fault])
    if not held:
        stage.leave(moment)
    driver_killed = target == "driver" and fault == "killed"
    if driver_killed:
        stage.end(code=-signal.SIGKILL)
        stage.resume()
    else:
        if target == "driver":
            time.sleep(8)  # longer than any heartbeat may take
            stage.strike(target, signal.SIGCONT)
        stage.end()
    checks.invariants(stage.command, STEPS, driver_killed=driver_killed)

    last = stage.command.metrics()[-1]
    attempts = len(list((stage.command.directory / "logs").glob("attempt_*")))
    assert attempts == 1 + (target == "learner-0" or driver_killed)
    if target.startswith("inference"):
        assert last["faults/worker_restarts"] == 1 and f"{target} is lost" in stage.command.err
    else:
        assert last["faults/worker_restarts"] == 0, stage.command.err
