"""Each chart of the page as a plotly figure made from `RunData`. Colours of text and grid are the page's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from olmorl.dashboard.figure import Figure
from olmorl.dashboard.run_data import RunData
from olmorl.metrics.ledger import BINS
from olmorl.metrics.time_ledger import ENGINE_TIMES, LEARNER_TIMES

Runs = Sequence[RunData]
Row = dict[str, Any]
HISTOGRAM_STEPS = 20  # the newest, whose samples the histograms hold
TIMELINE_SECONDS = 300.0
TIMELINE_ROWS = 2000  # that are drawn
WORKER_ROWS = 100  # of each worker
LEGEND_WORKERS = 12  # more names than these would leave no room for the lines

# Okabe and Ito's colours, told apart by colour-blind eyes, on dark and on light.
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _YELLOW, _GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#D8C93A",
    "#8A8F98",
)
_CYCLE = (_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _YELLOW, _GREY)
_DASHES = ("solid", "dot", "dash", "longdash", "dashdot", "longdashdot")
_ACTIVITY = {
    "starting": _YELLOW,
    "decode": _BLUE,
    "prefill": _SKY,
    "recompute": _PURPLE,
    "stalled": _RED,
    "training": _GREEN,
    "sending": _ORANGE,
    "checkpointing": _PURPLE,
    "waiting": _GREY,
}
_FATE: dict[str, str] = dict(
    zip(BINS, (_GREEN, _GREY, _SKY, _ORANGE, _YELLOW, _PURPLE, _BLUE, _RED, "#A56A43", "#5C6370"), strict=True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    id: str
    title: str
    says: str
    """one line on what is read off it"""
    make: Callable[[Runs], Figure]


def _lines(
    runs: Runs, names: Iterable[str | tuple[str, str]], *, y: str = "", percent: bool = False, log: bool = False
) -> Figure:
    """One line a metric and run; runs differ by dash, metrics by colour. A pair is (metric, label)."""
    figure = Figure()
    for number, run in enumerate(runs):
        for colour, name in zip(cycle(_CYCLE), names, strict=False):
            metric, label = name if isinstance(name, tuple) else (name, name.split("/", 1)[1])
            steps, values = run.series(metric)
            if steps:
                figure.add(
                    "scatter",
                    x=steps,
                    y=values,
                    name=label if len(runs) == 1 else f"{label} · {run.name}",
                    mode="lines+markers" if len(steps) <= 60 else "lines",
                    line={"color": colour, "dash": _DASHES[number % len(_DASHES)], "width": 1.8},
                    marker={"size": 4},
                )
    figure.titles(x="step", y=y)
    if percent:
        figure.layout["yaxis"].update(tickformat=".0%", rangemode="tozero")
    if log:
        figure.layout["yaxis"].update(type="log")
    return figure


def _short(values: Iterable[float]) -> list[float]:
    """As exact as a chart: half the bytes."""
    return [float(f"{value:.6g}") for value in values]


def _stacked(run: RunData, prefix: str, kinds: Iterable[str], colours: Mapping[str, str]) -> Figure:
    """Shares of a whole, one band a kind."""
    figure = Figure()
    for kind in kinds:
        steps, values = run.series(f"{prefix}/{kind}")
        if any(values):
            figure.add(
                "scatter",
                x=steps,
                y=_short(values),
                name=kind,
                mode="lines",
                stackgroup="all",
                groupnorm="fraction",
                line={"width": 0.5, "color": colours[kind]},
                hovertemplate="%{y:.1%}",
            )
    figure.titles(x="step")
    figure.layout["hovermode"] = "x unified"
    figure.layout["yaxis"].update(tickformat=".0%", range=[0, 1])
    return figure


def _rewards(runs: Runs) -> Figure:
    sources = [n for n in runs[0].names("reward/") if n.endswith("/mean") and n != "reward/mean"]
    names: list[tuple[str, str]] = [("reward/mean", "reward"), ("reward/solve_rate", "solve rate")]
    return _lines(runs, [*names, *((name, name.split("/")[1]) for name in sources[:4] if len(sources) > 1)])


def _evaluations(runs: Runs) -> Figure:
    names = [name for name in runs[0].names("eval/") if name.endswith(("/avg_at_k", "/pass_at_k"))]
    return _lines(runs, [(name, name.removeprefix("eval/")) for name in names], percent=True)


def _utilisation(runs: Runs) -> Figure:
    kinds = ("inference_mbu", "inference_mfu", "decode_mbu", "decode_mfu", "prefill_mfu", "learner_mfu")
    figure = _lines(runs, [(f"throughput/{kind}", kind.replace("_", " ")) for kind in kinds], percent=True)
    line = {"color": _GREY, "dash": "dot", "width": 1}
    figure.layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": line}]
    figure.layout["annotations"] = [
        {"text": "peak of the device", "x": 1, "y": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
        | {"showarrow": False}
    ]
    return figure


def _learner_time(runs: Runs) -> Figure:
    return _stacked(runs[0], "learner_time", LEARNER_TIMES, _ACTIVITY)


def _engine_time(runs: Runs) -> Figure:
    return _stacked(runs[0], "engine_time", ENGINE_TIMES, _ACTIVITY)


def _waste(runs: Runs) -> Figure:
    return _stacked(runs[0], "waste", BINS, _FATE)


def _lengths(runs: Runs) -> Figure:
    samples = runs[0].samples(HISTOGRAM_STEPS)
    figure = Figure()
    if samples:
        lengths = np.concatenate([s.lengths for s in samples])
        truncated = np.concatenate([s.truncated for s in samples])
        cut = f"truncated ({truncated.mean():.1%})" if len(truncated) else "truncated"
        edges = np.histogram_bin_edges(lengths, bins=min(40, max(1, int(lengths.max(initial=1)))))
        _bars(figure, edges, (("ended by itself", lengths[~truncated], _BLUE), (cut, lengths[truncated], _RED)))
    figure.titles(x="response tokens", y="samples")
    figure.layout["barmode"] = "stack"
    return figure


def _bars(figure: Figure, edges: np.ndarray, parts: Iterable[tuple[str, np.ndarray, str]]) -> None:
    for name, values, colour in parts:
        counts, _ = np.histogram(values, bins=edges)
        figure.add(
            "bar", x=((edges[:-1] + edges[1:]) / 2).tolist(), y=counts.tolist(), name=name, marker={"color": colour}
        )
    figure.layout["bargap"] = 0.05


def _version_lag(runs: Runs) -> Figure:
    samples = runs[0].samples(HISTOGRAM_STEPS)
    figure = Figure()
    for name, parts, colour in (
        ("oldest token of a sample", [s.lags for s in samples], _ORANGE),
        ("each trained token", [s.ages for s in samples], _BLUE),
    ):
        counts = np.zeros(max(map(len, parts), default=0))
        for part in parts:
            counts[: len(part)] += part
        if counts.any():
            shares = (counts / counts.sum()).tolist()
            figure.add("bar", x=list(range(len(counts))), y=shares, name=name, marker={"color": colour})
    figure.titles(x="policy versions between sampling and training")
    figure.layout["barmode"] = "group"
    figure.layout["xaxis"].update(dtick=1)
    figure.layout["yaxis"].update(tickformat=".0%")
    return figure


def _workers(runs: Runs, gauge: str, *, percent: bool = False) -> Figure:
    figure = Figure()
    rows = [row for row in runs[0].timeline(TIMELINE_SECONDS) if gauge in row]
    of_workers = _by_worker(rows)
    for colour, (worker, own) in zip(cycle(_CYCLE), of_workers.items(), strict=False):
        figure.add(
            "scatter",
            x=_times(own),
            y=[row[gauge] for row in own],
            name=worker,
            mode="lines",
            line={"color": colour, "shape": "hv"},
        )
    figure.layout.update(showlegend=len(of_workers) <= LEGEND_WORKERS)
    if percent:
        figure.layout["yaxis"].update(tickformat=".0%", rangemode="tozero")
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
            "spent": {kind: sum(row["spent"].get(kind, 0.0) for row in part) for kind in _ACTIVITY},
            "updates": sum(row.get("updates", 0.0) for row in part),
        }
        for worker, own in of_workers.items()
        for part in (own[at : at + many] for at in range(0, len(own), many))
    ]


def _timeline(runs: Runs) -> Figure:
    """A bar a worker and row of the timeline, split into what it did."""
    rows = _coarse(runs[0].timeline(TIMELINE_SECONDS))
    workers = sorted({row["worker"] for row in rows}, key=lambda name: (name == "learner", len(name), name))
    figure = Figure()
    for kind, colour in _ACTIVITY.items():
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
            marker={"symbol": "line-ns-open", "size": 18, "color": _RED, "line": {"width": 2}},
            hovertemplate="%{y}: new weights<extra></extra>",
        )
    figure.layout.update(barmode="overlay", bargap=0.25, height=max(330, 110 + 18 * len(workers)))
    figure.layout["xaxis"].update(type="date")
    if rows:  # the bars' lengths are numbers, which would pull the axis to the year 1970
        start, end = min(row["t"] - row["span"] for row in rows), max(row["t"] for row in rows)
        figure.layout["xaxis"].update(range=[_stamp(start), _stamp(end)])
    figure.layout["yaxis"].update(categoryorder="array", categoryarray=workers[::-1], range=[-0.5, len(workers) - 0.5])
    return figure


def _spent(rows: Sequence[Row], kind: str) -> list[tuple[float, float, str]]:
    """(start, seconds, worker) of a kind; inside a row the kinds follow each other in the order of the legend."""
    bars: list[tuple[float, float, str]] = []
    for row in rows:
        start = row["t"] - row["span"]
        for other in _ACTIVITY:
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


CHARTS = (
    Chart(id="reward", title="Reward", says="of all samples of a step, trained or not", make=_rewards),
    Chart(id="eval", title="Evaluation", says="on pinned versions; step 0 is the start", make=_evaluations),
    Chart(
        id="throughput",
        title="Tokens per second",
        says="generated, trained, and trained with an advantage (goodput)",
        make=lambda runs: _lines(
            runs,
            [
                ("throughput/tokens_per_second", "generated"),
                ("throughput/trained_tokens_per_second", "trained"),
                ("throughput/goodput", "goodput"),
            ],
            y="tokens/s",
        ),
    ),
    Chart(
        id="utilisation",
        title="MFU and MBU",
        says="share of the device's peak: over wall time, and in decode and prefill steps alone",
        make=_utilisation,
    ),
    Chart(id="learner_time", title="Where the learner's time goes", says="shares of wall time", make=_learner_time),
    Chart(id="engine_time", title="Where the engines' time goes", says="shares of wall time", make=_engine_time),
    Chart(id="waste", title="Where the tokens go", says="every generated token has one fate", make=_waste),
    Chart(id="lengths", title="Response lengths", says=f"of the last {HISTOGRAM_STEPS} steps", make=_lengths),
    Chart(
        id="version_lag",
        title="Staleness",
        says=f"age of what was trained in the last {HISTOGRAM_STEPS} steps",
        make=_version_lag,
    ),
    Chart(
        id="off_policy",
        title="Off-policy",
        says="age and importance ratio of the trained tokens",
        make=lambda runs: _lines(
            runs,
            [
                "off_policy/version_lag_mean",
                "off_policy/version_lag_max",
                "off_policy/importance_ratio_mean",
                "off_policy/capped_fraction",
            ],
        ),
    ),
    Chart(
        id="mismatch",
        title="Mismatch between engine and learner",
        says="difference of logprobs at one version; the canary after each update",
        make=lambda runs: _lines(
            runs,
            [("mismatch/logprob_abs_diff_mean", "trained tokens"), ("canary/logprob_abs_diff_mean", "canary")],
            y="nats",
            log=True,
        ),
    ),
    Chart(
        id="optim",
        title="Learner",
        says="gradient norm, entropy and share of clipped tokens",
        make=lambda runs: _lines(runs, ["optim/grad_norm", "rollout/entropy", "loss/clip_fraction"]),
    ),
    Chart(
        id="sync",
        title="Weight updates",
        says="seconds from sending to serving, and how long engines stood still",
        make=lambda runs: _lines(
            runs, [("sync/seconds", "update"), ("sync/stall_seconds", "engines stalled")], y="seconds", log=True
        ),
    ),
    Chart(
        id="faults",
        title="Faults",
        says="so far in this attempt",
        make=lambda runs: _lines(
            runs,
            [
                ("faults/worker_restarts", "workers restarted"),
                ("faults/prompts_reissued", "requests issued again"),
                ("sync/failures", "failed updates"),
            ],
        ),
    ),
    Chart(id="live_batch", title="Live batch", says="running samples a worker", make=lambda r: _workers(r, "running")),
    Chart(
        id="kv_usage",
        title="KV cache",
        says="share in use a worker",
        make=lambda r: _workers(r, "kv_usage", percent=True),
    ),
    Chart(
        id="timeline",
        title="Workers, the last minutes",
        says="what each did, in which order within a few seconds left open (times are UTC)",
        make=_timeline,
    ),
)
