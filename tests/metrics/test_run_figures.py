"""Figures of a run: each weighted by what it is a rate of."""

from typing import Any

import pytest

from olmorl.contract.errors import DataError
from olmorl.metrics.run_figures import run_figures


def row(step: int, span: float, **changes: float) -> dict[str, Any]:
    values = {
        "progress/step": step,
        "time/step": span,
        "throughput/tokens_per_second": 100.0,
        "throughput/trained_tokens_per_second": 50.0,
        "throughput/inference_mfu": 0.1,
        "throughput/inference_mbu": 0.2,
        "learner_time/waiting": span / 4,
        "learner_time/training": span / 2,
        "learner_time/sending": span / 4,
        "engine_time/decode": span,
        "engine_time/prefill": 0.0,
        "engine/step_seconds": 0.01,
        "engine/slot_waste": 0.5,
        "sync/stall_seconds": 0.1,
        "sync/seconds": 0.3,
    }
    return values | {name.replace("__", "/"): value for name, value in changes.items()}


def test_means_are_weighted_by_what_they_are_rates_of() -> None:
    rows = [
        row(0, 60.0),
        row(1, 1000.0, throughput__tokens_per_second=1.0),
        row(2, 2.0),
        row(3, 6.0, throughput__tokens_per_second=300.0, throughput__trained_tokens_per_second=10.0,
            engine__slot_waste=0.1, engine__step_seconds=0.002),
    ]  # fmt: skip
    found = run_figures(rows, skip=1)
    assert (found.steps, found.seconds, found.step_seconds) == (2, 8.0, 4.0)
    assert found.tokens_per_second == pytest.approx((2 * 100 + 6 * 300) / 8)
    assert found.trained_tokens_per_second == pytest.approx((2 * 50 + 6 * 10) / 8)
    assert found.slot_waste == pytest.approx((200 * 0.5 + 3000 * 0.1) / 3200), "by engine steps"
    assert found.learner_wait_share == pytest.approx(0.25) and found.train_seconds == pytest.approx(2.0)
    assert found.snapshot_seconds == pytest.approx(1.0)


def test_a_row_without_an_update_or_an_engine_step() -> None:
    idle = row(2, 1.0, sync__stall_seconds=0.5)
    for name in ("sync/stall_seconds", "sync/seconds", "engine/slot_waste", "engine/step_seconds"):
        del idle[name]
    found = run_figures([row(1, 1.0), idle], skip=0)
    assert found.stall_seconds == 0.1 and found.slot_waste == 0.5


def test_too_short_a_run() -> None:
    with pytest.raises(DataError, match=r"5 steps are in metrics\.jsonl, and the first 4 fill"):
        run_figures([row(step, 1.0) for step in range(5)], skip=4)
