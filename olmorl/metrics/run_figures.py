"""What a run made of its hardware over several steps, from its rows in metrics.jsonl: rightly weighted means."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmorl.contract.errors import DataError
from olmorl.metrics.jsonl_sink import read_metrics

Row = Mapping[str, Any]
_BUSY = ("prefill", "decode", "recompute")
_NEEDED = (
    "time/step",
    "throughput/trained_tokens_per_second",
    "learner_time/waiting",
    "learner_time/training",
    "learner_time/sending",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Names as in the plans; shares are fractions of 1, times are seconds."""

    steps: int
    seconds: float
    tokens_per_second: float
    trained_tokens_per_second: float
    step_seconds: float
    learner_wait_share: float
    train_seconds: float
    mfu: float
    mbu: float
    slot_waste: float
    stall_seconds: float
    """median over updates"""
    update_seconds: float
    """from the snapshot to the last commit, median over updates"""
    snapshot_seconds: float
    """for which the learners hand their weights over, mean"""


def read_figures(directory: Path, *, skip: int) -> RunFigures:
    """Of the run in `directory`, of one attempt. The first `skip` steps, in which it fills its pipeline, do not count.

    Raises:
        DataError: it wrote no metrics, or none of the steps behind these.
    """
    try:
        return run_figures(list(read_metrics(directory / "metrics.jsonl")), skip=skip)
    except DataError as error:
        raise DataError(f"the run {directory.name} has nothing to measure: {error}") from None


def run_figures(rows: Sequence[Row], *, skip: int) -> RunFigures:
    """As `read_figures`, of rows in order."""
    made = len(rows)
    rows = [row for row in rows if row["progress/step"] > skip]
    if not rows:
        raise DataError(
            f"{made} steps are in metrics.jsonl, and the first {skip} fill the pipeline; let it run for longer"
        )
    for row in rows:
        if lacking := [name for name in _NEEDED if row.get(name) is None]:
            raise DataError(f"the row of step {row['progress/step']} lacks {', '.join(lacking)}")
    if not any(row["throughput/trained_tokens_per_second"] for row in rows):
        raise DataError(f"no token was trained in the {len(rows)} steps behind the first {skip}")
    spans = [_seconds(row, "learner_time") for row in rows]
    span, count = sum(spans), len(rows)
    # Tokens and time of training are counted from one step's end to the next, those of engines from row to row.
    trained_span = sum(row["time/step"] for row in rows)
    trained = sum(row["throughput/trained_tokens_per_second"] * row["time/step"] for row in rows)
    engine_steps = [_engine_steps(row) for row in rows]

    def mean(name: str, weights: Sequence[float]) -> float:
        return sum((row.get(name) or 0.0) * w for row, w in zip(rows, weights, strict=True)) / max(sum(weights), 1e-9)

    return RunFigures(
        steps=count,
        seconds=span,
        tokens_per_second=mean("throughput/tokens_per_second", spans),
        trained_tokens_per_second=trained / trained_span,
        step_seconds=trained_span / count,
        learner_wait_share=sum(row["learner_time/waiting"] for row in rows) / span,
        train_seconds=sum(row["learner_time/training"] for row in rows) / count,
        mfu=mean("throughput/inference_mfu", spans),
        mbu=mean("throughput/inference_mbu", spans),
        slot_waste=mean("engine/slot_waste", engine_steps),
        stall_seconds=_median(rows, "sync/stall_seconds"),
        update_seconds=_median(rows, "sync/seconds"),
        snapshot_seconds=sum(row["learner_time/sending"] for row in rows) / count,
    )


def _seconds(row: Row, ledger: str) -> float:
    return float(sum(value for name, value in row.items() if name.startswith(f"{ledger}/")))


def _engine_steps(row: Row) -> float:
    busy = sum(row.get(f"engine_time/{kind}", 0.0) for kind in _BUSY)
    return busy / row["engine/step_seconds"] if row.get("engine/step_seconds") else 0.0


def _median(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else 0.0
