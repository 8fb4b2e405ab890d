"""`olmorl bench`: measure a part of the system on this machine, print a table, write the figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from olmorl.cli.engine_options import with_engine_options
from olmorl.cli.option_checks import a_folder, finite, writable

TABLE_WIDTH = 150  # at least, also where nobody says how wide the terminal is

JsonFile = Annotated[Path | None, typer.Option("--json", callback=writable, help="Also write the figures here.")]

app = typer.Typer(help="Measure the parts of the system on this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.command("engine")
@with_engine_options
def bench_engine(
    *,
    engine: dict[str, Any],
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    workload: Annotated[
        Path, typer.Option(help='Run directory, or JSON list of {"prompt": [ids], "max_tokens": n, "group": g}.')
    ],
    json_file: JsonFile = None,
    published: Annotated[
        bool, typer.Option("--as-reported", help="Also MFU and MBU by the constants of OLMo 3's ablation.")
    ] = False,
) -> None:
    """Tokens a second of the engine on a load.

    And its share of what the device can do. EOS is ignored.
    """
    from olmorl.bench.engine import bench_engine as measure
    from olmorl.metrics.utilization import as_reported

    figures = measure(model, workload, engine)
    if published:
        figures |= as_reported(figures["tokens_per_second"], devices=engine["tensor_parallel_size"])
    _report(figures, json_file)


@app.command()
def learner(
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    batch: Annotated[
        Path,
        typer.Option(
            help='Run directory, or JSON list of {"prompt": [ids], "tokens": [ids], "advantage": a, "logprobs": [...]}.'
        ),
    ],
    json_file: JsonFile = None,
    dtype: str = "float32",
    device: str = "cpu",
    tokens_per_micro_batch: int = 8192,
    logprob_chunk_tokens: int = 1024,
    activation_checkpointing: bool = False,
    compile: Annotated[bool, typer.Option("--compile", help="Decoder layers by torch.compile.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed training steps, after one that is not.")] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.")] = None,
) -> None:
    """Tokens a second of training steps on a batch.

    And their share of what the device can do, and their peak memory.
    """
    from olmorl.bench.learner import bench_learner

    options = {
        "dtype": dtype,
        "device": device,
        "logprob_chunk_tokens": logprob_chunk_tokens,
        "activation_checkpointing": activation_checkpointing,
        "compile": compile,
        "threads": threads,
    }
    figures = bench_learner(model, batch, options, tokens_per_micro_batch=tokens_per_micro_batch, steps=steps)
    _report(figures, json_file)


@app.command()
def sync(
    model: Annotated[str, typer.Option(help="Hugging Face folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings of a run, such as sync.transport=ipc.")
    ] = None,
    json_file: JsonFile = None,
    engines: Annotated[int, typer.Option(min=1)] = 2,
    live: Annotated[int, typer.Option(min=1, help="Samples that an engine decodes at once.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=4, help="Of the longest sample.")] = 128,
    seconds: Annotated[
        float,
        typer.Option(min=0.1, callback=finite, help="With updates in flight; the whole takes three times as long."),
    ] = 120,
    interval: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Seconds from one update to the next.")
    ] = 10,
) -> None:
    """What a weight update costs engines under load.

    In flight, with a pause, and after a drain.
    """
    from olmorl.bench.sync import SyncLoad, bench_sync

    load = SyncLoad(engines=engines, live=live, max_tokens=max_tokens, seconds=seconds, interval=interval)
    _report(bench_sync(model, load, overrides or []), json_file)


@app.command()
def ablation(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A run of one's own, whose model, data and rewards are the load."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings of every row.")] = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(callback=writable, help="Also draw them, as an HTML page.")] = None,
    folder: Annotated[
        Path,
        typer.Option(
            "--out", callback=a_folder, help="Keeps the runs; rows that were measured are not measured again."
        ),
    ] = Path("outputs/ablation"),
    seconds: Annotated[
        float | None, typer.Option(min=0.1, callback=finite, help="Of each measurement; 45 if not given.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Measurements of each row; 2 if not given.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each role, in every row; 1 if not given.")] = None,
    quick: Annotated[bool, typer.Option(help="A tiny model, for a moment: that it works, no more.")] = False,
) -> None:
    """The same load under one switch after another.

    From static batches and synchronous steps to updates in flight and int8 rollouts, each row beside what the planner
    says of it. Without CONFIG the load is drawn: a model with random weights, response lengths of OLMo 3's shape.
    """
    from rich.console import Console

    from olmorl.bench.ablation import DEFAULT, QUICK, bench_ablation
    from olmorl.cli.ablation_table import ablation_plot, ablation_table

    load = QUICK if quick else DEFAULT
    load = replace(
        load, seconds=seconds or load.seconds, repeats=repeats or load.repeats, threads=threads or load.threads
    )
    if config is not None and "=" in str(config):  # an override, and no file
        overrides, config = [str(config), *(overrides or [])], None
    console = Console(stderr=True)
    figures = bench_ablation(
        folder.resolve(),
        load=load,
        config=config,
        overrides=overrides or [],
        progress=lambda told: console.print(f"[dim]{told}[/dim]"),
    )
    Console(width=max(console.width, TABLE_WIDTH)).print(ablation_table(figures))
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if plot is not None:
        plot.write_text(ablation_plot(figures))


@app.command()
def planner(
    json_file: JsonFile = None,
    folder: Annotated[
        Path, typer.Option("--out", callback=a_folder, help="Keeps the runs; what was measured is not measured again.")
    ] = Path("outputs/plan_check"),
    seconds: Annotated[
        float | None, typer.Option(min=0.1, callback=finite, help="Of each run; 45 if not given.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A tiny model, for a moment: that it works, no more.")] = False,
) -> None:
    """Six kinds of run measured beside what `olmorl plan` says.

    The planner knows two short benchmarks, of the engine and the learner.
    """
    from rich.console import Console

    from olmorl.bench.ablation import DEFAULT, QUICK
    from olmorl.bench.plan_check import bench_plan_check
    from olmorl.cli.plan_check import report

    load = QUICK if quick else DEFAULT
    console = Console(stderr=True)
    compared = bench_plan_check(
        folder.resolve(),
        load=replace(load, seconds=seconds or load.seconds),
        progress=lambda told: console.print(f"[dim]{told}[/dim]"),
    )
    report(compared, json_file=json_file)


def _report(figures: dict[str, Any], json_file: Path | None) -> None:
    _print(figures)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def _print(figures: dict[str, Any], prefix: str = "") -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            _print(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            print(f"{prefix + name:34} {value:.4g}" if isinstance(value, float) else f"{prefix + name:34} {value}")
