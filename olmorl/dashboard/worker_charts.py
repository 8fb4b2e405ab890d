"""Charts of the last minutes, worker by worker, from the rows of the timeline."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from olmorl.dashboard.figure import Figure
from olmorl.dashboard.palette import ACTIVITY, CYCLE, RED
from olmorl.dashboard.run_data import RunData

Row = dict[str, Any]
TIMELINE_SECONDS = 300.0
TIMELINE_ROWS = 2000  # that are drawn
WORKER_ROWS = 100  # of each worker
TIME = "time, UTC"
CLOCK = {"type": "date", "tickformat": "%H:%M:%S"}
LEGEND_WORKERS = 12  # more names than these would leave no room for the lines


def gauge(run: RunData, name: str, *, y: str, percent: bool = False) -> Figure:
    """A line a worker."""
    figure = Figure()
    rows = [row for row in run.timeline(TIMELINE_SECONDS) if name in row]
    of_workers = _by_worker(rows)
    for colour, (worker, own) in zip(cycle(CYCLE), of_workers.items(), strict=False):
        figure.add(
            "scatter",
            x=_times(own),
            y=[row[name] for row in own],
            name=worker,
            mode="lines",
            line={"color": colour, "shape": "hv"},
        )
    figure.titles(x=TIME, y=y)
    figure.layout["xaxis"].update(CLOCK)
    figure.layout.update(showlegend=len(of_workers) <= LEGEND_WORKERS)
    figure.layout["yaxis"].update(rangemode="tozero", **({"tickformat": "~%"} if percent else {}))
    return figure


def _by_worker(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["worker"], []).append(row)
    return found


def _coarse(rows: Sequence[Row]) -> list[Row]:
    """By worker; neighbours made one until each kind is some pixels wide, for narrower bars hide each other."""
    of_workers = _by_worker(rows)
    many = -(-len(rows) // min(TIMELINE_ROWS, WORKER_ROWS * max(1, len(of_workers))))
    return [
        {
            "worker": worker,
            "t": part[-1]["t"],
            "span": sum(row["span"] for row in part),
            "spent": {kind: sum(row["spent"].get(kind, 0.0) for row in part) for kind in ACTIVITY},
            "updates": sum(row.get("updates", 0.0) for row in part),
        }
        for worker, own in of_workers.items()
        for part in (own[at : at + many] for at in range(0, len(own), many))
    ]


def timeline(run: RunData) -> Figure:
    """A bar a worker and row of the timeline, split into what it did."""
    rows = _coarse(run.timeline(TIMELINE_SECONDS))
    workers = sorted({row["worker"] for row in rows}, key=lambda name: (name == "learner", len(name), name))
    figure = Figure()
    for kind, colour in ACTIVITY.items():
        bars = _spent(rows, kind)
        if not bars:
            continue
        figure.add(
            "bar",
            base=[_stamp(start) for start, _, _ in bars],
            x=[seconds * 1e3 for _, seconds, _ in bars],
            y=[worker for _, _, worker in bars],
            customdata=[round(seconds, 3) for _, seconds, _ in bars],
            hovertemplate="%{y} " + kind + " %{customdata} s<extra></extra>",
            orientation="h",
            name=kind,
            marker={"color": colour, "line": {"width": 0}},
        )
    updates = [row for row in rows if row.get("updates")]
    if updates:
        figure.add(
            "scatter",
            x=_times(updates),
            y=[row["worker"] for row in updates],
            mode="markers",
            name="new weights",
            marker={"symbol": "line-ns-open", "size": 18, "color": RED, "line": {"width": 2}},
            hovertemplate="%{y}: new weights<extra></extra>",
        )
    figure.layout.update(barmode="overlay", bargap=0.25, height=max(330, 110 + 18 * len(workers)))
    figure.titles(x=TIME)
    figure.layout["xaxis"].update(CLOCK)
    if rows:  # the bars' lengths are numbers, which would pull the axis to the year 1970
        start, end = min(row["t"] - row["span"] for row in rows), max(row["t"] for row in rows)
        figure.layout["xaxis"].update(range=[_stamp(start), _stamp(end)])
    figure.layout["yaxis"].update(categoryorder="array", categoryarray=workers[::-1], range=[-0.5, len(workers) - 0.5])
    figure.layout["yaxis"]["automargin"] = True  # for their names
    return figure


def _spent(rows: Sequence[Row], kind: str) -> list[tuple[float, float, str]]:
    """(start, seconds, worker) of a kind; inside a row the kinds follow each other in the order of the legend."""
    bars: list[tuple[float, float, str]] = []
    for row in rows:
        start = row["t"] - row["span"]
        for other in ACTIVITY:
            seconds = row["spent"].get(other, 0.0)
            if other == kind and seconds > 0:
                before = bars[-1] if bars else None
                if before and before[2] == row["worker"] and abs(before[0] + before[1] - start) < 2e-3:
                    bars[-1] = (before[0], before[1] + seconds, row["worker"])  # one bar through several rows
                else:
                    bars.append((start, seconds, row["worker"]))
            start += seconds
    return bars


def _times(rows: Iterable[Row]) -> list[str]:
    return [_stamp(row["t"]) for row in rows]


def _stamp(seconds: float) -> str:
    return str(np.datetime64(round(seconds * 1e3), "ms"))
