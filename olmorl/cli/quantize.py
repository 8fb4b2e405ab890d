"""`olmorl quantize`: GPTQ and AWQ checkpoints, and what their bits cost."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from olmorl.cli.option_checks import writable


def quantize(
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    prompts: Annotated[str, typer.Option(help="jsonl, parquet or Hugging Face data set to calibrate on.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint; new or empty.")],
    method: Annotated[str, typer.Option(help="gptq or awq.")] = "gptq",
    bits: Annotated[int, typer.Option(help="gptq: 2, 3, 4 or 8; awq: 4.")] = 4,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Inputs that share a scale; 128, or less where that does not fit.")
    ] = None,
    desc_act: Annotated[bool, typer.Option("--desc-act", help="GPTQ: large inputs first.")] = False,
    limit: Annotated[int | None, typer.Option(help="Of the prompts, the first so many.")] = 128,
    prompt_column: str | None = None,
    max_prompt_tokens: int = 512,
    max_tokens: Annotated[int, typer.Option(help="Sampled behind each prompt; 0: prompts alone.")] = 256,
    widths: Annotated[
        str | None, typer.Option(help="Also compare so many bits: 8,6,5,4,3. To nearest, GPTQ and AWQ each.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Also write the figures here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="With --widths: an HTML page of the comparison.")
    ] = None,
    seed: int = 0,
) -> None:
    """Make a GPTQ or AWQ checkpoint of a model.

    Calibrated on prompts and on what the model writes behind them; a quarter of both is held out for perplexity.
    """
    from olmorl.bench.quantize import QuantizeJob
    from olmorl.bench.quantize import quantize as run
    from olmorl.config.data_sections import SourceSection
    from olmorl.contract.errors import ConfigError

    if method not in ("gptq", "awq"):
        raise ConfigError(f"--method is {method!r}; it must be gptq or awq")
    if plot is not None and widths is None:
        raise ConfigError("--plot shows a comparison; give --widths too, such as 8,4,3")
    job = QuantizeJob(
        model=model,
        prompts=SourceSection(path=prompts, prompt_column=prompt_column, limit=limit),
        out=out,
        method=method,  # type: ignore[arg-type]
        bits=bits,
        group_size=group_size,
        desc_act=desc_act,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        widths=_widths(widths),
        seed=seed,
    )
    result = run(job, lambda line: print(line, flush=True))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2))
    if plot is not None:
        from olmorl.bench.quantize_plot import write_plot

        write_plot(plot, result["widths"], result["dense_perplexity"])
    print(_table(result))


def _widths(text: str | None) -> tuple[int, ...]:
    from olmorl.contract.errors import ConfigError

    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() and 2 <= int(part) <= 8 for part in parts):
        raise ConfigError(f"--widths is {text!r}; it must be numbers of bits from 2 to 8, such as 8,4,3")
    return tuple(map(int, parts))


def _table(result: dict[str, Any]) -> str:
    lines = []
    if result["widths"]:
        lines.append(f"{'bits':>4} {'method':8}{'MB':>8}{'error':>9}{'perplexity':>12}{'tokens/s':>10}  computed as")
        lines += [
            f"{row['bits']:4} {row['method']:8}{row['size_bytes'] / 1e6:8.1f}{row['error']:9.4f}"
            f"{row['perplexity']:12.3f}{row['tokens_per_second']:10.0f}  {row['computed_as']}"
            for row in result["widths"]
        ]
    before, after = result["dense_bytes"] / 1e6, result["bytes"] / 1e6
    lines.append(
        f"{result['checkpoint']}: {after:.1f} MB of {before:.1f}, perplexity {result['perplexity']:.3f}, dense "
        f"{result['dense_perplexity']:.3f}"
    )
    return "\n".join(lines)
