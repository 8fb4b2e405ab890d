"""`olmorl plan`: config and hardware in, a table of plans out, the best one named."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.planner.plan import Plan, Question, as_json, doubts, explain, factors, finalists, first_look, sensitivity
from olmorl.planner.question import question_of
from olmorl.planner.split import as_overrides, given

SHOWN = 8


def plan(
    config_path: Path,
    overrides: Sequence[str],
    *,
    as_given: bool,
    gpus: int,
    device_name: str,
    shape: str | None,
    lengths: Path | None,
    mean_length: float | None,
    zero_variance: float,
    bench: Path | None,
    learner_bench: Path | None,
    price_per_hour: float | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    config = load_config(config_path, overrides)
    question = question_of(
        config,
        num_devices=None if as_given else gpus,
        device_name=device_name,
        shape=shape,
        lengths=lengths,
        mean_length=mean_length,
        zero_variance=zero_variance,
        bench=bench,
        learner_bench=learner_bench,
        price_per_hour=price_per_hour,
    )
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        looked: list[Plan] = []
        if not as_given:
            looked = first_look(question, progress=lambda done, total: bar.update(task, completed=done, total=total))
            bar.update(task, description="the best of them again")
        found = finalists(question, looked) if looked else [given(config, question)]
        bar.update(task, description="what it hangs on")
        changes = sensitivity(question, found[0])
    price = f"${question.device.dollars_per_hour:g} an hour"
    if price_per_hour is None:
        price += f", a round price of {device_name} (--price-per-hour)"
    console.print(_table(found, question, price))
    console.print(f"\n{'as given' if as_given else 'best'}: {explain(question, found[0])}.")
    console.print(
        f"{config.run.steps:,} steps take {_duration(config.run.steps * found[0].step_seconds)}, evaluation apart."
    )
    for change, effect in changes.items():
        console.print(f"  {change}: {effect:+.0%} trained tokens/s")
    told = (
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in factors(question).items()
    )
    console.print(f"by these factors: {', '.join(told)}", highlight=False)
    for doubt in doubts(question, found[0]):
        console.print(f"[bold]beware:[/bold] {doubt}", highlight=False)
    settings = [] if as_given else [*as_overrides(found[0]), *_apart(config)]
    command = shlex.join(["olmorl", "train", str(config_path), *overrides, *settings])
    console.print(f"\nrun it with:\n  {command}", soft_wrap=True, highlight=False, markup=False)
    if json_file is not None:
        told_all = as_json(found, question, changes, looked) | {"command": command}
        json_file.write_text(json.dumps(told_all, indent=1) + "\n")
    if plot is not None:
        _plot([*found, *looked], plot)


def _apart(config: Config) -> list[str]:
    """Settings without which those of a plan would count for nothing."""
    shares = ["inference.gpu_share=1", "learner.gpu_share=1"] if config.shares_gpu else []
    return [*shares, *(["cluster.split=given"] if config.cluster.split == "auto" else [])]


def _table(found: Sequence[Plan], question: Question, price: str) -> Table:
    title = f"{question.shape.name} on {question.num_devices} {question.device.name}"
    caption = (
        "trained: tok/s; step: seconds; waits: the learner, of its time; lag: versions, mean/most; KV: memory in use; "
        "redo: tokens computed again; "
        f"$/M: a million trained tokens, a device at {price}"
    )
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True
    )
    for name in (
        "gen",
        "train",
        "TP",
        "slots",
        "tok/s",
        "trained",
        "step",
        "waits",  # the learner
        "lag",
        "KV",
        "redo",
        "$/M",
    ):
        table.add_column(name, justify="right")
    for plan in found[:SHOWN]:
        table.add_row(
            str(plan.inference_gpus),
            str(plan.learner_gpus),
            str(plan.tensor_parallel),
            str(plan.slots),
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.trained_tokens_per_second:,.0f}",
            f"{plan.step_seconds:,.1f}",
            f"{plan.learner_wait_share:.0%}",
            f"{plan.staleness_mean:.1f}/{plan.staleness_max}",
            f"{plan.kv_used_share:.0%}",
            f"{plan.preemption_share:.1%}",
            "-" if plan.cost_per_million_trained_tokens is None else f"{plan.cost_per_million_trained_tokens:,.2f}",
        )
    return table


def _duration(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 86400:.1f} days" if seconds > 2 * 86400 else f"{seconds / 3600:.1f} hours"


def _plot(found: Sequence[Plan], path: Path) -> None:
    """Trained tokens a second over the split, a line a tensor parallel degree, as one self-contained page."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for degree in sorted({plan.tensor_parallel for plan in found}):
        best: dict[int, Plan] = {}
        for plan in found:  # the best come first
            if plan.tensor_parallel == degree:
                best.setdefault(plan.inference_gpus, plan)
        points = [best[number] for number in sorted(best)]
        figure.add_scatter(
            x=[p.inference_gpus for p in points],
            y=[p.trained_tokens_per_second for p in points],
            name=f"TP {degree}",
            mode="lines+markers",
            customdata=[[p.slots, p.learner_wait_share, p.step_seconds] for p in points],
            hovertemplate="%{x} generate, %{customdata[0]} slots<br>%{y:,.0f} trained tok/s<br>"
            "learner waits %{customdata[1]:.0%}, step %{customdata[2]:,.0f} s",
        )
    figure.update_layout(xaxis_title="devices that generate", yaxis_title="trained tokens/s", template="plotly_white")
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))
