"""Every second has one name, and the names add up."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.metrics.time_ledger import LEARNER_TIMES, LearnerTime, TimeLedger, engine_seconds
from olmorl.metrics.timeline import Timeline
from olmorl.metrics.utilization import Peak

PEAK = Peak(flops=100.0, bandwidth=10.0)


@given(st.lists(st.tuples(st.sampled_from(LEARNER_TIMES), st.integers(0, 1000))))
def test_a_learners_seconds_add_up_to_wall_time(work: list[tuple[LearnerTime, int]]) -> None:
    now = 0.0
    ledger = TimeLedger(clock=lambda: now)
    expected: dict[str, float] = dict.fromkeys(LEARNER_TIMES, 0.0)
    for doing, seconds in work:
        ledger.enter(doing)
        now += seconds
        expected[doing] += seconds
    assert ledger.totals() == expected and sum(ledger.totals().values()) == now


def test_what_is_done_meanwhile_ends_also_by_an_error() -> None:
    now = 0.0
    ledger = TimeLedger(clock=lambda: now)
    ledger.enter("waiting")
    now = 1.0
    with contextlib.suppress(RuntimeError), ledger.during("training"):
        now = 3.0
        raise RuntimeError
    now = 7.0
    assert ledger.totals() == {"starting": 0, "waiting": 5, "training": 2, "sending": 0, "checkpointing": 0}


@given(*[st.floats(0, 50)] * 4, st.floats(0, 100), st.booleans())
def test_an_engines_seconds_add_up(
    decode: float, prefill: float, recompute: float, stall: float, idle: float, together: bool
) -> None:
    """Also where a recomputed chunk shared its step with a prompt, so that its seconds count as prefill too."""
    lived = decode + prefill + recompute + stall + idle
    after = {
        "wall_seconds": lived,
        "busy_seconds": decode + prefill + recompute,
        "prefill_seconds": prefill + (recompute if together else 0.0),
        "recompute_seconds": recompute,
        "stall_seconds": stall,
    }
    spent = engine_seconds({}, after, span=lived + 3.0)
    assert sum(spent.values()) == pytest.approx(lived + 3.0)
    assert all(seconds >= -1e-9 for seconds in spent.values())
    assert spent["stalled"] == stall and spent["recompute"] == recompute
    assert spent["starting"] == pytest.approx(3.0) and spent["waiting"] == pytest.approx(idle)
    assert spent["prefill"] + spent["decode"] == pytest.approx(prefill + decode)
    twice = {name: 2 * seconds for name, seconds in after.items()}
    later = engine_seconds(after, twice, span=lived / 2)
    assert sum(later.values()) == pytest.approx(lived) and later["starting"] == 0, "a snapshot that came late"


def test_the_timeline_is_kept_short_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path, peak=PEAK, started=0.0, max_bytes=20_000)
    for second in range(1, 400):
        counters = {"wall_seconds": float(second), "busy_seconds": 0.5 * second, "output_tokens": 7.0 * second}
        timeline.write({"inference-0": counters}, {"waiting": float(second)}, now=second)
    timeline.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.stat().st_size <= 20_000 and rows[-1]["t"] == 399
    engine = [row for row in rows if row["worker"] == "inference-0"]
    assert [row["t"] for row in engine] == list(range(400 - len(engine), 400)), "rows are missing"
    assert engine[-1]["tokens_per_second"] == 7 and engine[-1]["spent"]["decode"] == 0.5


def test_an_engine_that_said_nothing_new_has_no_row(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl", peak=PEAK, started=0.0)
    for second in (1.0, 2.0, 3.0):
        counters = {"wall_seconds": 1.0 if second < 3 else 3.0}
        timeline.write({"inference-0": counters}, {}, now=second)
    timeline.close()
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [row["t"] for row in rows if row["worker"] == "inference-0"] == [1.0, 3.0]
    assert rows[-2]["span"] == 2.0


def test_engines_that_are_heard_of_late_were_starting(tmp_path: Path) -> None:
    """They are not told of before their first weights are live; one that joins later may have been built before."""
    timeline = Timeline(tmp_path / "timeline.jsonl", peak=PEAK, started=10.0)
    timeline.write({}, {"starting": 5.0}, now=15.0)
    timeline.write({"inference-0": {"wall_seconds": 4.0}}, {"starting": 5.0, "waiting": 1.0}, now=16.0)
    engines = {"inference-0": {"wall_seconds": 5.0}, "inference-1": {"wall_seconds": 3.0}}
    timeline.write(engines, {"starting": 5.0, "waiting": 2.0}, now=17.0)
    timeline.close()
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    first, _, second = [row for row in rows if row["worker"] != "learner"]
    assert (first["t"], first["span"], first["spent"]["starting"]) == (16.0, 6.0, 2.0)
    assert (second["t"], second["span"], second["spent"]["starting"]) == (17.0, 3.0, 0.0)


def test_snapshots_that_come_late_leave_no_gap(tmp_path: Path) -> None:
    """Those of an engine are up to a second old, and none is of the middle of a step; a newcomer starts when it is
    first heard of."""
    timeline = Timeline(tmp_path / "timeline.jsonl", peak=PEAK, started=10.0)
    clocks = [0.5, 0.5, 2.5, 2.6, 4.9]
    for second, clock in enumerate(clocks, start=1):
        engines = {"inference-0": {"wall_seconds": clock, "busy_seconds": clock - 0.25}}
        if second >= 3:
            engines["inference-1"] = {} if second == 3 else {"wall_seconds": 0.5 * (second - 3), "busy_seconds": 0.1}
        timeline.write(engines, {"waiting": second}, now=10.0 + second)
    timeline.close()
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    for row in rows:
        assert sum(row["spent"].values()) == pytest.approx(row["span"], abs=2e-3) and min(row["spent"].values()) >= 0
    first = [row for row in rows if row["worker"] == "inference-0"]
    assert [row["t"] for row in first] == pytest.approx([11.0, 13.0, 13.1, 15.4])
    assert first[0]["spent"]["starting"] == 0.5 and all(row["spent"]["starting"] == 0 for row in first[1:])
    newcomer = [row for row in rows if row["worker"] == "inference-1"]
    assert [row["t"] for row in newcomer] == [14.0, 14.5] and [row["span"] for row in newcomer] == [2.0, 0.5]
    assert newcomer[0]["spent"]["starting"] == pytest.approx(1.5)


def test_a_row_ends_when_its_counters_came(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl", peak=PEAK, started=10.0)
    timeline.write({"inference-0": {"wall_seconds": 4.0, "as_of": 15.2}}, {"starting": 6.0}, now=16.0)
    timeline.write({"inference-0": {"wall_seconds": 5.5, "as_of": 16.7}}, {"starting": 7.0}, now=17.0)
    timeline.close()
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    first, second = [row for row in rows if row["worker"] == "inference-0"]
    assert (first["t"], first["span"], first["spent"]["starting"]) == pytest.approx((15.2, 5.2, 1.2))
    assert (second["t"], second["span"]) == pytest.approx((16.7, 1.5))
