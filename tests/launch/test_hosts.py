"""Training across hosts: namespaces with addresses of their own, joined by a bridge that can be cut."""

import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)

OnHosts = Callable[[list[int]], Any]
STEPS = 6


def test_two_ranks_and_an_engine_on_three_hosts(on_hosts: OnHosts) -> None:
    """Each offers one CPU, so each holds one worker: gradients and weights cross the bridge."""
    run = on_hosts([1, 1, 1])
    run.start("run.steps=2", "learner.workers=2")
    run.wait_for(lambda: run.steps() > 0)
    assert {run.host_of(name) for name in ("learner-0", "learner-1", "inference-0")} == {0, 1, 2}
    run.end()
    run.assert_well(2)


def start_with_a_spare(run: Any, *settings: str) -> None:
    """A learner and two engines where each worker host could hold two; the driver's host holds none."""
    run.start(
        "inference.workers=2",
        f"run.steps={STEPS}",
        "checkpoint.every=1",
        "cluster.heartbeat_seconds=5",
        "sync.timeout_seconds=20",
        *settings,
    )
    run.wait_for(lambda: run.steps() > 1)


def host_without_learner(run: Any) -> int:
    return 3 - run.host_of("learner-0")


@pytest.mark.soak
@pytest.mark.parametrize("role", ["engine", "learner"])
@pytest.mark.parametrize("seconds", [20, None])
def test_a_host_whose_link_is_cut(on_hosts: OnHosts, role: str, seconds: float | None) -> None:
    run = on_hosts([0, 2, 2])
    start_with_a_spare(run)
    victim = host_without_learner(run) if role == "engine" else run.host_of("learner-0")
    began = time.monotonic()
    run.hosts.cut(victim)
    run.wait_for(lambda: " is lost: " in run.said() or "starting again" in run.said() or run.steps() > STEPS)
    noticed = time.monotonic() - began
    if seconds is not None:
        time.sleep(max(0.0, seconds - noticed))
        run.hosts.mend(victim)
    run.end()
    run.assert_well(STEPS)
    assert noticed < 15, "lost hosts are to be noticed in seconds"


@pytest.mark.soak
def test_a_host_that_dies_and_another_that_joins(on_hosts: OnHosts) -> None:
    run = on_hosts([0, 2, 2])
    start_with_a_spare(run, "inference.max_workers=3", "run.steps=30")
    victim = host_without_learner(run)
    run.hosts.kill(victim)
    run.wait_for(lambda: " is lost: " in run.said())
    joined = run.hosts.add(2)
    run.wait_for(
        lambda: any(run.worker(f"inference-{i}") and run.host_of(f"inference-{i}") == joined for i in range(9))
    )
    run.end()
    run.assert_well(30)
