"""Rates from counters: worked by hand, additive over time, and safe when a worker starts again."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.metrics.utilization import Peak, as_reported, since, utilization

PEAK = Peak(flops=100.0, bandwidth=10.0)


def test_by_hand() -> None:
    before = {"flops": 50.0, "bytes": 5.0, "wall_seconds": 1.0}
    after = {"flops": 150.0, "bytes": 15.0, "wall_seconds": 3.0}
    used = utilization(before, after, peak=PEAK)
    assert (used.mfu, used.mbu, used.seconds) == (0.5, 0.5, 2.0)
    assert utilization({}, {"flops": 100.0, "bytes": 5.0, "busy": 2.0}, peak=PEAK, seconds="busy").mbu == 0.25


def test_no_time_is_no_use() -> None:
    same = {"flops": 50.0, "bytes": 5.0, "wall_seconds": 1.0}
    used = utilization(same, same, peak=PEAK)
    assert (used.mfu, used.mbu) == (0.0, 0.0)


def test_a_restarted_counter_begins_at_zero() -> None:
    assert since({"flops": 90.0}, {"flops": 30.0}, "flops") == 30.0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 999), st.integers(0, 99)), min_size=2))
def test_spans_add_up(steps: list[tuple[int, int, int]]) -> None:
    snapshots = [{"flops": 0.0, "bytes": 0.0, "wall_seconds": 0.0}]
    for seconds, flops, num_bytes in steps:
        last = snapshots[-1]
        snapshots.append(
            {
                "flops": last["flops"] + flops,
                "bytes": last["bytes"] + num_bytes,
                "wall_seconds": last["wall_seconds"] + seconds,
            }
        )
    whole = utilization(snapshots[0], snapshots[-1], peak=PEAK)
    parts = [utilization(a, b, peak=PEAK) for a, b in pairwise(snapshots)]
    assert sum(p.mfu * p.seconds for p in parts) == pytest.approx(whole.mfu * whole.seconds)
    assert sum(p.mbu * p.seconds for p in parts) == pytest.approx(whole.mbu * whole.seconds)


@pytest.mark.parametrize(
    ("rate", "mfu", "mbu"),
    [(881, 0.0030, 0.1290), (975, 0.0033, 0.1429), (1358, 0.0046, 0.1989), (2949, 0.0101, 0.4321)],
)
def test_the_published_table_is_reproduced(rate: float, mfu: float, mbu: float) -> None:
    reported = as_reported(rate, devices=8)
    assert reported["mbu_as_reported"] == pytest.approx(mbu, abs=2e-4)
    assert reported["mfu_as_reported"] == pytest.approx(mfu, abs=5e-5)
