"""The published set-ups, simulated: what docs/planning.md says of them, kept true."""

import pytest

from olmorl.planner.published import (
    ABLATION,
    HOST_SECONDS_AT_FIRST,
    HOST_SECONDS_THREADED,
    OUR_HOST_SECONDS,
    RUN_7B,
    RUN_32B,
    ablation_outcome,
    fitted_learner_efficiency,
    run_outcome,
)


def test_the_rows_of_the_ablation() -> None:
    """The first and the third row are what the two factors were fitted on; the last one is predicted."""
    host = [HOST_SECONDS_AT_FIRST, HOST_SECONDS_AT_FIRST, HOST_SECONDS_THREADED, HOST_SECONDS_THREADED]
    outcomes = [ablation_outcome(n, host_seconds=seconds) for n, seconds in enumerate(host)]
    rates = [outcome.tokens_per_second for outcome in outcomes]
    assert outcomes[0].slot_waste == pytest.approx(0.54, abs=0.02)
    published = [row.tokens_per_second for row in ABLATION]
    assert rates[0] == pytest.approx(published[0], rel=0.01) and rates[2] == pytest.approx(published[2], rel=0.01)
    assert rates[1] == pytest.approx(published[1], rel=0.12), "one wave of samples a step: nothing to refill with"
    assert rates[3] == pytest.approx(published[3], rel=0.05)


def test_admission_by_live_blocks_holds_more_sequences_on_the_same_devices() -> None:
    theirs = ablation_outcome(3, host_seconds=HOST_SECONDS_THREADED)
    ours = ablation_outcome(3, host_seconds=HOST_SECONDS_THREADED, slots=None)
    assert theirs.live_batch == pytest.approx(16, abs=0.1) and ours.live_batch > 40
    assert ours.tokens_per_second > 2.3 * theirs.tokens_per_second


@pytest.mark.soak
def test_the_32b_run() -> None:
    efficiency = fitted_learner_efficiency(RUN_32B)
    found = run_outcome(RUN_32B, host_seconds=HOST_SECONDS_THREADED, learner_efficiency=efficiency)
    assert found.step_seconds == pytest.approx(1000, rel=0.15)
    assert 0.75 <= found.learner_wait_share <= 0.90
    assert found.train_seconds == pytest.approx(125, rel=0.1)


@pytest.mark.soak
def test_the_7b_run() -> None:
    """With the default of the host; with the host's part of their ablation a step takes far longer."""
    efficiency = fitted_learner_efficiency(RUN_32B)
    low, high = RUN_7B.step_seconds
    found = run_outcome(RUN_7B, host_seconds=OUR_HOST_SECONDS, learner_efficiency=efficiency)
    assert 0.85 * low <= found.step_seconds <= 1.15 * high
    slow = run_outcome(RUN_7B, host_seconds=HOST_SECONDS_THREADED, learner_efficiency=efficiency)
    assert slow.step_seconds > 2 * high
