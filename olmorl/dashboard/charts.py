"""Each chart of the page as a plotly figure made from `RunData`. Colours of text and grid are the page's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go

from olmorl.dashboard.run_data import RunData
from olmorl.metrics.ledger import BINS
from olmorl.metrics.time_ledger import ENGINE_TIMES, LEARNER_TIMES

Runs = Sequence[RunData]
HISTOGRAM_STEPS = 20  # the newest, whose samples the histograms hold
TIMELINE_SECONDS = 300.0

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
_DASHES = ("solid", "dot", "dash", "longdash")
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
    make: Callable[[Runs], go.Figure]


def _lines(
    runs: Runs, names: Iterable[str | tuple[str, str]], *, y: str = "", percent: bool = False, log: bool = False
) -> go.Figure:
    """One line a metric and run; runs differ by dash, metrics by colour. A pair is (metric, label)."""
    figure = go.Figure()
    for number, run in enumerate(runs):
        for colour, name in zip(cycle(_CYCLE), names, strict=False):
            metric, label = name if isinstance(name, tuple) else (name, name.split("/", 1)[1])
            steps, values = run.series(metric)
            if steps:
                figure.add_scatter(
                    x=steps,
                    y=values,
                    name=label if len(runs) == 1 else f"{label} · {run.name}",
                    mode="lines+markers" if len(steps) <= 60 else "lines",
                    line={"color": colour, "dash": _DASHES[number % len(_DASHES)], "width": 1.8},
                    marker={"size": 4},
                )
    figure.update_layout(xaxis_title="step", yaxis_title=y)
    if percent:
        figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    if log:
        figure.update_yaxes(type="log")
    return figure


def _stacked(run: RunData, prefix: str, kinds: Iterable[str], colours: Mapping[str, str]) -> go.Figure:
    """Shares of a whole, one band a kind."""
    figure = go.Figure()
    for kind in kinds:
        steps, values = run.series(f"{prefix}/{kind}")
        if any(values):
            figure.add_scatter(
                x=steps,
                y=values,
                name=kind,
                mode="lines",
                stackgroup="all",
                groupnorm="fraction",
                line={"width": 0.5, "color": colours[kind]},
                hovertemplate="%{y:.1%}",
            )
    figure.update_layout(xaxis_title="step", hovermode="x unified")
    figure.update_yaxes(tickformat=".0%", range=[0, 1])
    return figure


def _rewards(runs: Runs) -> go.Figure:
    sources = [n for n in runs[0].names("reward/") if n.endswith("/mean") and n != "reward/mean"]
    names: list[tuple[str, str]] = [("reward/mean", "reward"), ("reward/solve_rate", "solve rate")]
    return _lines(runs, [*names, *((name, name.split("/")[1]) for name in sources[:4] if len(sources) > 1)])


def _evaluations(runs: Runs) -> go.Figure:
    names = [name for name in runs[0].names("eval/") if name.endswith(("/avg_at_k", "/pass_at_k"))]
    return _lines(runs, [(name, name.removeprefix("eval/")) for name in names], percent=True)


def _utilisation(runs: Runs) -> go.Figure:
    kinds = ("inference_mbu", "inference_mfu", "decode_mbu", "decode_mfu", "prefill_mfu", "learner_mfu")
    figure = _lines(runs, [(f"throughput/{kind}", kind.replace("_", " ")) for kind in kinds], percent=True)
    figure.add_hline(y=1.0, line={"color": _GREY, "dash": "dot", "width": 1}, annotation_text="peak of the device")
    return figure


def _learner_time(runs: Runs) -> go.Figure:
    return _stacked(runs[0], "learner_time", LEARNER_TIMES, _ACTIVITY)


def _engine_time(runs: Runs) -> go.Figure:
    return _stacked(runs[0], "engine_time", ENGINE_TIMES, _ACTIVITY)


def _waste(runs: Runs) -> go.Figure:
    return _stacked(runs[0], "waste", BINS, _FATE)


def _lengths(runs: Runs) -> go.Figure:
    samples = runs[0].samples(HISTOGRAM_STEPS)
    figure = go.Figure()
    if samples:
        lengths = np.concatenate([s.lengths for s in samples])
        truncated = np.concatenate([s.truncated for s in samples])
        edges = np.histogram_bin_edges(lengths, bins=min(40, max(1, int(lengths.max(initial=1)))))
        _bars(figure, edges, (("ended by itself", lengths[~truncated], _BLUE), ("truncated", lengths[truncated], _RED)))
        figure.add_annotation(
            text=f"{truncated.mean():.1%} truncated",
            x=1,
            y=1,
            xref="paper",
            yref="paper",
            xanchor="right",
            showarrow=False,
        )
    figure.update_layout(xaxis_title="response tokens", yaxis_title="samples", barmode="stack")
    return figure


def _bars(figure: go.Figure, edges: np.ndarray, parts: Iterable[tuple[str, np.ndarray, str]]) -> None:
    for name, values, colour in parts:
        counts, _ = np.histogram(values, bins=edges)
        figure.add_bar(x=((edges[:-1] + edges[1:]) / 2).tolist(), y=counts.tolist(), name=name, marker_color=colour)
    figure.update_layout(bargap=0.05)


def _version_lag(runs: Runs) -> go.Figure:
    samples = runs[0].samples(HISTOGRAM_STEPS)
    figure = go.Figure()
    for name, values, colour in (
        ("oldest token of a sample", [s.lags for s in samples], _ORANGE),
        ("each trained token", [s.ages for s in samples], _BLUE),
    ):
        found = np.concatenate(values) if values else np.zeros(0, np.int64)
        if len(found):
            counts = np.bincount(np.maximum(found, 0))
            shares = (counts / counts.sum()).tolist()
            figure.add_bar(x=list(range(len(counts))), y=shares, name=name, marker_color=colour)
    figure.update_layout(xaxis_title="policy versions between sampling and training", barmode="group")
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(tickformat=".0%")
    return figure


def _workers(runs: Runs, gauge: str, *, percent: bool = False) -> go.Figure:
    figure = go.Figure()
    rows = [row for row in runs[0].timeline(TIMELINE_SECONDS) if gauge in row]
    for colour, worker in zip(cycle(_CYCLE), dict.fromkeys(row["worker"] for row in rows), strict=False):
        own = [row for row in rows if row["worker"] == worker]
        figure.add_scatter(
            x=_times(own),
            y=[row[gauge] for row in own],
            name=worker,
            mode="lines",
            line={"color": colour, "shape": "hv"},
        )
    figure.update_layout(yaxis_title="")
    if percent:
        figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return figure


def _timeline(runs: Runs) -> go.Figure:
    """A bar a worker and row of the timeline, split into what it did."""
    rows = runs[0].timeline(TIMELINE_SECONDS)
    workers = sorted({row["worker"] for row in rows})
    figure = go.Figure()
    for kind, colour in _ACTIVITY.items():
        bars = _spent(rows, kind)
        if not bars:
            continue
        figure.add_bar(
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
        figure.add_scatter(
            x=_times(updates),
            y=[row["worker"] for row in updates],
            mode="markers",
            name="new weights",
            marker={"symbol": "line-ns-open", "size": 18, "color": _RED, "line": {"width": 2}},
            hovertemplate="%{y}: new weights<extra></extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_xaxes(type="date")
    if rows:  # the bars' lengths are numbers, which would pull the axis to the year 1970
        figure.update_xaxes(range=[_stamp(rows[0]["t"] - rows[0]["span"]), _stamp(rows[-1]["t"])])
    figure.update_yaxes(categoryorder="array", categoryarray=workers[::-1])
    return figure


def _spent(rows: Sequence[dict[str, Any]], kind: str) -> list[tuple[float, float, str]]:
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


def _times(rows: Iterable[dict[str, Any]]) -> list[str]:
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
    Chart(
        id="timeline",
        title="Workers, the last minutes",
        says="what each did, second by second (times are UTC)",
        make=_timeline,
    ),
    Chart(id="live_batch", title="Live batch", says="running samples a worker", make=lambda r: _workers(r, "running")),
    Chart(
        id="kv_usage",
        title="KV cache",
        says="share in use a worker",
        make=lambda r: _workers(r, "kv_usage", percent=True),
    ),
)
