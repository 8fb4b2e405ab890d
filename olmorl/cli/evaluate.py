"""`olmorl eval`: what a model makes of sets of prompts, as a table and as JSON."""

import asyncio
import json
import math
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, OlmoRLError
from olmorl.controller.evaluate import Evaluation
from olmorl.controller.evaluate_model import evaluate_model
from olmorl.controller.failing import first_failing
from olmorl.controller.run_directory import RunDirectory
from olmorl.controller.step_metrics import evaluation_rows
from olmorl.metrics.pass_at_k import Estimate
from olmorl.metrics.rollout_log import write_rollouts

COLUMNS = (TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn())


def configure(model: str, settings: Mapping[str, object]) -> tuple[Config, int]:
    """(config of the evaluation, policy version of the model). `settings` are config keys; None leaves one as it is.

    A run directory stands for its newest export, evaluated as the run's own config says but for `settings`.
    """
    overrides = [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items() if value is not None
    ]
    directory = RunDirectory(Path(model))
    if not directory.config_file.is_file():
        data = settings.get("eval.data")
        if not data:
            raise ConfigError(
                f"{model} is no run directory, and as a model there is nothing to evaluate it on; give --data, a file "
                "of prompts with their answers"
            )
        needed = [f"model.path={json.dumps(model)}", f"data.train={json.dumps(data)}"]  # which is never read
        return load_config(None, [*needed, *overrides]), 0
    found = directory.newest_export()
    if found is None:
        raise ConfigError(
            f"{model} holds no export; a run writes one when it ends, with checkpoint.export = true. Let it end; "
            "run.steps=N with --resume ends it at its newest checkpoint, after N steps"
        )
    version, folder = found
    config = load_config(directory.config_file, [f"model.path={json.dumps(str(folder))}", *overrides])
    if not config.eval.data:
        raise ConfigError(
            f"the config of {model} names no eval.data; give --data, a file of prompts with their answers"
        )
    return config, version


def evaluate(model: str, settings: Mapping[str, object], *, json_file: Path | None, samples_file: Path | None) -> None:
    config, version = configure(model, settings)
    console = Console(stderr=True)
    begun: list[float] = []
    with Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("loading", total=None)

        def start(total: int) -> None:
            begun.append(time.perf_counter())
            progress.update(task, total=total, description="samples")

        async def main() -> list[Evaluation]:
            # A polite kill is a Ctrl-C, which the event loop ends by cancelling.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
            advance = partial(progress.advance, task)
            return await evaluate_model(config, version=version, on_start=start, on_scored=advance)

        evaluations = asyncio.run(main())
    seconds = time.perf_counter() - begun[0]
    if samples_file is not None:
        write_rollouts(samples_file, [row for one in evaluations for row in evaluation_rows(one, attempt=0)])
    report = {
        "model": config.model.path,
        "version": version,
        "seconds": seconds,
        "tokens_per_second": sum(one.num_tokens for one in evaluations) / seconds,
        "sets": {one.set.name: describe(one) for one in evaluations},
    }
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    for one in evaluations:
        print(format_evaluation(one))
    if trouble := first_failing(((one.set.name, one.groups) for one in evaluations), config.reward):
        raise OlmoRLError(f"{trouble}. Mend it, or name another with --verifier")


def describe(one: Evaluation) -> dict[str, Any]:
    """Figures by the names they have in metrics.jsonl, and pass@1, pass@2, pass@4, ... up to k."""
    passed = {k: one.pass_at(k) for k in smaller_ks(one.k)}
    return {
        "prompts": len(one.groups),
        "k": one.k,
        **_figures("avg_at_k", one.avg_at_k),
        **_figures("pass_at_k", passed[one.k]),
        "pass_at": {str(k): _figures("mean", estimate) for k, estimate in passed.items()},
        "unscored": one.num_unscored,
        "truncated_fraction": one.truncated_fraction,
        "response_length_mean": float(one.lengths.mean()),
    }


def smaller_ks(k: int) -> list[int]:
    """1, 2, 4, ... and k."""
    return sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k})


def format_evaluation(one: Evaluation) -> str:
    figures = [(f"avg@{one.k}", one.avg_at_k), *((f"pass@{k}", one.pass_at(k)) for k in smaller_ks(one.k))]
    lines = [f"{one.set.name}: {len(one.groups):,} prompts x {one.k} samples"]
    lines += [f"  {name:<10} {_plain(estimate)}" for name, estimate in figures]
    lines.append(f"  {'length':<10} {one.lengths.mean():.1f} tokens, {one.truncated_fraction:.1%} truncated")
    if one.num_unscored:
        lines.append(f"  {'unscored':<10} {one.num_unscored:,} samples, left out of the figures")
    return "\n".join(lines)


def _plain(estimate: Estimate) -> str:
    error = estimate.standard_error
    return f"{estimate.mean:.4f}" + (f" ± {error:.4f}" if math.isfinite(error) else "")


def _figures(name: str, estimate: Estimate) -> dict[str, float | None]:
    """JSON has no NaN: what is not known is null."""
    error = "stderr" if name == "mean" else f"{name}_stderr"
    return {
        key: value if math.isfinite(value) else None
        for key, value in ((name, estimate.mean), (error, estimate.standard_error))
    }
