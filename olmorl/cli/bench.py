"""`olmorl bench`: measure a part of the system on this machine, print a table, write the figures."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Measure the parts of the system on this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def learner(
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    batch: Annotated[
        Path, typer.Option(help='JSON list of {"prompt": [ids], "tokens": [ids], "advantage": a, "logprobs": [...]}.')
    ],
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
    dtype: str = "float32",
    device: str = "cpu",
    tokens_per_micro_batch: int = 8192,
    logprob_chunk_tokens: int = 1024,
    activation_checkpointing: bool = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed training steps, after one that is not.")] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.")] = None,
) -> None:
    """Tokens a second of training steps on a batch, their share of what the device can do, and their peak memory."""
    from olmorl.bench.learner import bench_learner

    options = {
        "dtype": dtype,
        "device": device,
        "logprob_chunk_tokens": logprob_chunk_tokens,
        "activation_checkpointing": activation_checkpointing,
        "threads": threads,
    }
    figures = bench_learner(model, batch, options, tokens_per_micro_batch=tokens_per_micro_batch, steps=steps)
    _report(figures, json_file)


def _report(figures: dict[str, Any], json_file: Path | None) -> None:
    for name, value in figures.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
