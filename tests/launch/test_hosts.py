"""Training across hosts: namespaces with addresses of their own, joined by a bridge that can be cut."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)

OnHosts = Callable[[list[int]], Any]
STEPS = 40


def test_two_ranks_and_an_engine_on_three_hosts(on_hosts: OnHosts) -> None:
    """Each offers one CPU, so each holds one worker: gradients and weights cross the bridge."""
    run = on_hosts([1, 1, 1])
    run.start("run.steps=100", "learner.workers=2")
    run.wait_for(lambda: run.steps() > 1)
    assert {run.host_of(name) for name in ("learner-0", "learner-1", "inference-0")} == {0, 1, 2}
    run.interrupt()
    run.assert_well(run.steps() - 1)


@pytest.mark.soak
def test_a_fourth_host_that_joins_and_dies(on_hosts: OnHosts) -> None:
    run = on_hosts([1, 1, 1])
    run.start("run.steps=1000", "learner.workers=2", "inference.max_workers=2")
    run.wait_for(lambda: run.steps() > 1)
    fourth = run.hosts.add(1)
    run.wait_for(lambda: "inference-1" in run.served_last())
    assert run.host_of("inference-1") == fourth
    run.hosts.kill(fourth)
    run.wait_for(lambda: "inference-1 is lost" in run.said())
    step = run.steps()
    run.wait_for(lambda: run.steps() > step + 1)
    run.interrupt()
    run.assert_well(run.steps() - 1)


@pytest.mark.soak
def test_doctor_and_then_two_of_each_on_three_hosts(on_hosts: OnHosts) -> None:
    run = on_hosts([1, 2, 1])
    code, out = run.command("doctor", str(run.config))
    assert code == 0, out
    for words in ("10.77.0.2 (2 CPU)", "all nodes hold the same versions"):
        assert words in out, out
    ring = re.findall(r"gloo from (\S+) to (\S+): ", out)
    hosts = {f"10.77.0.{number}" for number in (1, 2, 3)}
    assert len(ring) == 3 and {a for a, _ in ring} == {b for _, b in ring} == hosts, out
    assert out.count("checks of its own") + out.count("host-") >= 3 and out.count(": clock ") == 3, out

    code, out = run.command("train", str(run.config), "run.name=too_large", "inference.workers=9")
    assert code == 2 and "take the nearest that fits: inference.workers = 3, learner.workers = 1" in out, out

    run.start("run.steps=3", "inference.workers=2", "learner.workers=2", "checkpoint.every=1")
    run.wait_for(lambda: run.steps() > 0)
    workers = ("learner-0", "learner-1", "inference-0", "inference-1")
    assert {run.host_of(name) for name in workers} == {0, 1, 2}
    run.end()
    run.assert_well(3)
    assert re.search(r"start: room for 2 inference x cpu, 2 learner x cpu.*: done in", run.said())


def start_with_a_spare(run: Any, *settings: str) -> None:
    """A learner and two engines where each worker host could hold two; the driver's host holds none."""
    run.start(
        "inference.workers=2",
        f"run.steps={STEPS}",
        "checkpoint.every=10",
        "cluster.heartbeat_seconds=5",
        "sync.timeout_seconds=20",
        *settings,
    )
    run.wait_for(lambda: run.steps() > 1)


def host_without_learner(run: Any) -> int:
    return 3 - run.host_of("learner-0")


def cut(run: Any, victim: int) -> float:
    """Returns how many seconds it took the run to notice."""
    began = time.monotonic()
    run.hosts.cut(victim)
    # No update can end without the engines behind the cut, nor a step without the learner: it must notice to go on.
    run.wait_for(lambda: " is lost: " in run.said() or "starting again" in run.said())
    return time.monotonic() - began


@pytest.mark.soak
@pytest.mark.parametrize("role", ["engine", "learner"])
@pytest.mark.parametrize("seconds", [20, None])
def test_a_host_whose_link_is_cut(on_hosts: OnHosts, role: str, seconds: float | None) -> None:
    run = on_hosts([0, 2, 2])
    start_with_a_spare(run)
    victim = host_without_learner(run) if role == "engine" else run.host_of("learner-0")
    noticed = cut(run, victim)
    assert noticed < 15, "lost hosts are to be noticed in seconds"
    if seconds is not None:
        time.sleep(max(0.0, seconds - noticed))
        run.hosts.mend(victim)
    run.end()
    run.assert_well(STEPS)
    if seconds is not None:  # a worker beyond a cut link hears of nothing
        run.assert_no_worker_left()


@pytest.mark.soak
def test_a_host_that_was_cut_off_is_used_again(on_hosts: OnHosts) -> None:
    run = on_hosts([0, 2, 1])  # three places for three workers: the only room for another is where the lost one was
    start_with_a_spare(run, "run.steps=1000")
    victim = host_without_learner(run)
    time.sleep(max(0.0, 20 - cut(run, victim)))
    run.hosts.mend(victim)
    run.wait_for(lambda: "inference-2" in run.served_last())
    assert run.host_of("inference-2") == victim
    run.interrupt()
    run.assert_well(run.steps() - 1)


@pytest.mark.soak
def test_a_host_that_dies_and_another_that_joins(on_hosts: OnHosts) -> None:
    run = on_hosts([0, 2, 2])
    start_with_a_spare(run, "inference.max_workers=3", "run.steps=1000")
    victim = host_without_learner(run)
    run.hosts.kill(victim)
    run.wait_for(lambda: " is lost: " in run.said())
    joined = run.hosts.add(2)
    run.wait_for(
        lambda: any(run.worker(f"inference-{i}") and run.host_of(f"inference-{i}") == joined for i in range(9))
    )
    run.interrupt()
    run.assert_well(run.steps() - 1)
