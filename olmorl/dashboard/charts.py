"""Each chart of the page as a plotly figure made from `RunData`. Colours of text and grid are the page's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, repeat

import numpy as np

from olmorl.dashboard.figure import Figure
from olmorl.dashboard.palette import ACTIVITY, BLUE, CYCLE, DASHES, FATE, GREY, ORANGE, RED
from olmorl.dashboard.run_data import RunData
from olmorl.dashboard.worker_charts import gauge, timeline
from olmorl.metrics.ledger import BINS
from olmorl.metrics.time_ledger import ENGINE_TIMES, LEARNER_TIMES

Runs = Sequence[RunData]
HISTOGRAM_STEPS = 20  # the newest, whose samples the histograms hold


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
    """One line a metric and run; runs differ by dash, metrics by colour. A pair is (metric, label). The first two are
    broad, and so still seen where another lies on them."""
    figure = Figure()
    for number, run in enumerate(runs):
        for colour, width, name in zip(cycle(CYCLE), chain([3.2, 2.2], repeat(1.3)), names, strict=False):
            metric, label = name if isinstance(name, tuple) else (name, name.split("/", 1)[1])
            steps, values = run.series(metric)
            if steps:
                figure.add(
                    "scatter",
                    x=steps,
                    y=_short(values) if not log else [value or None for value in _short(values)],  # no place for 0
                    name=label if len(runs) == 1 else f"{label} · {run.name}",
                    mode="lines+markers" if len(steps) <= 60 else "lines",
                    line={"color": colour, "dash": DASHES[number % len(DASHES)], "width": width},
                    marker={"size": 4},
                )
    figure.titles(x="step", y=y)
    if percent:
        figure.layout["yaxis"].update(tickformat=".0%", rangemode="tozero")
    if log:
        figure.layout["yaxis"].update(type="log", exponentformat="power")
    return figure


def _short(values: Iterable[float]) -> list[float]:
    """As exact as a chart: half the bytes."""
    return [float(f"{value:.6g}") for value in values]


def _stacked(run: RunData, prefix: str, kinds: Iterable[str], colours: Mapping[str, str], *, of: str) -> Figure:
    """Shares of a whole, one band a kind. A step without any is left out."""
    figure = Figure()
    found = {kind: dict(zip(*run.series(f"{prefix}/{kind}"), strict=True)) for kind in kinds}
    steps = sorted({step for values in found.values() for step, value in values.items() if value})
    for kind, values in found.items():
        if any(values.values()):
            figure.add(
                "scatter",
                x=steps,
                y=_short(values.get(step, 0.0) for step in steps),
                name=kind.replace("_", " "),
                mode="lines",
                stackgroup="all",
                groupnorm="fraction",
                line={"width": 0.5, "color": colours[kind]},
                fillcolor=colours[kind],
                hovertemplate="%{y:.1%}",
            )
    figure.titles(x="step", y=f"share of {of}")
    figure.layout["hovermode"] = "x unified"
    figure.layout["yaxis"].update(tickformat=".0%", range=[0, 1])
    return figure


def _rewards(runs: Runs) -> Figure:
    sources = [n for n in runs[0].names("reward/") if n.endswith("/mean") and n != "reward/mean"]
    names: list[tuple[str, str]] = [("reward/mean", "reward"), ("reward/solve_rate", "solve rate")]
    by_source = [(name, name.split("/")[1]) for name in sources[:4] if len(sources) > 1]
    return _lines(runs, [*names, *by_source], y="reward")


def _evaluations(runs: Runs) -> Figure:
    names = [name for name in runs[0].names("eval/") if name.endswith(("/avg_at_k", "/pass_at_k"))]
    labels = [name.removeprefix("eval/").replace("_at_", "@") for name in names]
    return _lines(runs, list(zip(names, labels, strict=True)), y="score", percent=True)


def _utilisation(runs: Runs) -> Figure:
    kinds = ("inference_mbu", "inference_mfu", "decode_mbu", "decode_mfu", "prefill_mfu", "learner_mfu")
    names = [(f"throughput/{kind}", kind.replace("_m", " M").replace("bu", "BU").replace("fu", "FU")) for kind in kinds]
    figure = _lines(runs, names, y="share of the peak", log=True)
    figure.layout["yaxis"].update(tickformat="~%")
    line = {"color": GREY, "dash": "dot", "width": 1}
    figure.layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": line}]
    figure.layout["annotations"] = [
        {"text": "peak of the device", "x": 1, "y": 0, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
        | {"showarrow": False}  # whose y is a logarithm
    ]
    return figure


def _learner_time(runs: Runs) -> Figure:
    return _stacked(runs[0], "learner_time", LEARNER_TIMES, ACTIVITY, of="wall time")


def _engine_time(runs: Runs) -> Figure:
    return _stacked(runs[0], "engine_time", ENGINE_TIMES, ACTIVITY, of="wall time")


def _waste(runs: Runs) -> Figure:
    return _stacked(runs[0], "waste", BINS, FATE, of="tokens")


def _lengths(runs: Runs) -> Figure:
    samples = runs[0].samples(HISTOGRAM_STEPS)
    figure = Figure()
    if samples:
        lengths = np.concatenate([s.lengths for s in samples])
        truncated = np.concatenate([s.truncated for s in samples])
        cut = f"truncated ({truncated.mean():.1%})" if len(truncated) else "truncated"
        edges = np.histogram_bin_edges(lengths, bins=min(40, max(1, int(lengths.max(initial=1)))))
        _bars(figure, edges, (("ended by itself", lengths[~truncated], BLUE), (cut, lengths[truncated], RED)))
    figure.titles(x="response tokens", y="samples")
    figure.layout["barmode"] = "stack"
    return figure


def _faults(runs: Runs) -> Figure:
    names = [
        ("faults/worker_restarts", "workers restarted"),
        ("faults/prompts_reissued", "requests issued again"),
        ("sync/failures", "failed updates"),
    ]
    figure = _lines(runs, names, y="count")
    figure.layout["yaxis"]["rangemode"] = "nonnegative"
    if max((count for trace in figure.data for count in trace["y"]), default=0) < 10:
        figure.layout["yaxis"]["dtick"] = 1  # there is no half a fault
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
        ("oldest token of a sample", [s.lags for s in samples], ORANGE),
        ("each trained token", [s.ages for s in samples], BLUE),
    ):
        counts = np.zeros(max(map(len, parts), default=0))
        for part in parts:
            counts[: len(part)] += part
        if counts.any():
            shares = (counts / counts.sum()).tolist()
            figure.add("bar", x=list(range(len(counts))), y=shares, name=name, marker={"color": colour})
    figure.titles(x="policy versions from drawing to training", y="share")
    figure.layout["barmode"] = "group"
    figure.layout["xaxis"].update(dtick=1)
    figure.layout["yaxis"].update(tickformat=".0%")
    return figure


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
        says="age in policy versions, and importance ratio, of the trained tokens",
        make=lambda runs: _lines(
            runs,
            [
                ("off_policy/version_lag_mean", "versions, mean"),
                ("off_policy/version_lag_max", "versions, most"),
                ("off_policy/importance_ratio_mean", "ratio, mean"),
                ("off_policy/capped_fraction", "share capped"),
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
        make=lambda runs: _lines(
            runs,
            [
                ("optim/grad_norm", "gradient norm"),
                ("rollout/entropy", "entropy, nats"),
                ("loss/clip_fraction", "share clipped"),
            ],
        ),
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
        make=_faults,
    ),
    Chart(
        id="live_batch",
        title="Live batch",
        says="running samples of each worker",
        make=lambda runs: gauge(runs[0], "running", y="samples"),
    ),
    Chart(
        id="kv_usage",
        title="KV cache",
        says="share of each worker's pool that is in use",
        make=lambda runs: gauge(runs[0], "kv_usage", y="share of the pool", percent=True),
    ),
    Chart(
        id="worker_throughput",
        title="Tokens per second of each worker",
        says="generated, in the last minutes",
        make=lambda runs: gauge(runs[0], "tokens_per_second", y="tokens/s"),
    ),
    Chart(
        id="worker_mbu",
        title="MBU of each worker",
        says="in the last minutes, over wall time",
        make=lambda runs: gauge(runs[0], "mbu", y="share of the peak", percent=True),
    ),
    Chart(
        id="timeline",
        title="Workers, the last minutes",
        says="what each did; the order within a second or two is not known",
        make=lambda runs: timeline(runs[0]),
    ),
)
