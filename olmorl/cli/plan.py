"""`olmorl plan`: config and hardware in, a table of plans out, the best one named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.planner.costs import LEARNER_EFFICIENCY, EngineCost, device
from olmorl.planner.fit import fitted_engine, fitted_learner
from olmorl.planner.load import Load, lognormal_lengths, read_lengths
from olmorl.planner.plan import Plan, Question, as_json, explain, plans, sensitivity
from olmorl.planner.shape import model_shape

SHOWN = 8
MEAN_OF_LONGEST = 14628 / 32768
"""OLMo 3's; taken where nothing is said of lengths"""


def plan(
    config_path: Path,
    overrides: Sequence[str],
    *,
    gpus: int,
    device_name: str,
    shape: str | None,
    lengths: Path | None,
    mean_length: float | None,
    zero_variance: float,
    bench: Path | None,
    learner_bench: Path | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    config = load_config(config_path, overrides)
    question = _question(
        config,
        gpus=gpus,
        device_name=device_name,
        shape=shape,
        lengths=lengths,
        mean_length=mean_length,
        zero_variance=zero_variance,
        bench=bench,
        learner_bench=learner_bench,
    )
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        found = plans(question, progress=lambda done, total: bar.update(task, completed=done, total=total))
        bar.update(task, description="what it hangs on")
        changes = sensitivity(question, found[0])
    console.print(_table(found, question))
    console.print(f"\nbest: {explain(question, found[0])}.")
    for change, effect in changes.items():
        console.print(f"  {change}: {effect:+.0%} trained tokens/s")
    console.print("\nrun it with:\n  " + _command(config_path, found[0]), soft_wrap=True, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(found, question, changes), indent=1) + "\n")
    if plot is not None:
        _plot(found, plot)


def _question(
    config: Config,
    *,
    gpus: int,
    device_name: str,
    shape: str | None,
    lengths: Path | None,
    mean_length: float | None,
    zero_variance: float,
    bench: Path | None,
    learner_bench: Path | None,
) -> Question:
    if gpus < 2:
        raise ConfigError(f"--gpus {gpus}: a plan splits at least 2 devices; one that serves both roles needs no plan")
    rollout = config.rollout
    model, hardware = model_shape(shape or config.model.path), device(device_name)
    longest = rollout.max_response_tokens
    drawn = read_lengths(lengths) if lengths else lognormal_lengths(mean_length or MEAN_OF_LONGEST * longest, longest)
    factors = None
    if bench is not None:
        factors = fitted_engine(EngineCost(shape=model, device=hardware), read_bench(bench, "--bench"))
    efficiency = LEARNER_EFFICIENCY
    if learner_bench is not None:
        efficiency = fitted_learner(model, read_bench(learner_bench, "--learner-bench")).efficiency
    return Question(
        shape=model,
        device=hardware,
        num_devices=gpus,
        load=Load(
            lengths=[min(n, longest) for n in drawn],
            prompt_tokens=rollout.max_prompt_tokens // 2,
            zero_variance=zero_variance,
        ),
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        max_response_tokens=longest,
        async_steps=rollout.async_steps,
        active_sampling=rollout.active_sampling,
        seed=config.run.seed,
        factors=factors,
        learner_efficiency=efficiency,
    )


def read_bench(path: Path, option: str) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        figures = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {error}") from None
    if not isinstance(figures, dict):
        raise ConfigError(f"{option} {path}: not the JSON of a benchmark")
    return figures


def _table(found: Sequence[Plan], question: Question) -> Table:
    table = Table(title=f"{question.shape.name} on {question.num_devices} {question.device.name}, best first")
    for name in (
        "generate",
        "train",
        "TP",
        "slots",
        "tok/s",
        "trained tok/s",
        "step",
        "learner waits",
        "lag",
        "recomputed",
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
            f"{plan.step_seconds:,.1f} s",
            f"{plan.learner_wait_share:.0%}",
            f"{plan.staleness_mean:.1f}/{plan.staleness_max}",
            f"{plan.preemption_share:.1%}",
            f"{plan.cost_per_million_trained_tokens:,.2f}",
        )
    return table


def _command(config: Path, best: Plan) -> str:
    workers = best.inference_gpus // best.tensor_parallel
    settings = f"inference.workers={workers} inference.max_num_seqs={best.slots} learner.workers={best.learner_gpus}"
    if best.tensor_parallel > 1:
        settings += f" inference.tensor_parallel={best.tensor_parallel}"
    return f"olmorl train {config} {settings}"


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
