"""`olmorl plan --check`: runs that were made, and what the planner says of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from olmorl.contract.errors import ConfigError
from olmorl.planner.check import Compared, compare, median_errors
from olmorl.planner.question import read_bench
from olmorl.planner.setup import Sharing


def plan_check(
    runs: Sequence[Path],
    *,
    bench: Path | None,
    learner_bench: Path | None,
    sharing: tuple[float, float],
    json_file: Path | None,
) -> None:
    if bench is None or learner_bench is None:
        raise ConfigError("--check plans by what was measured: give --bench and --learner-bench too")
    engine, learner = sharing
    compared = compare(
        runs,
        engine=read_bench(bench, "--bench"),
        learner=read_bench(learner_bench, "--learner-bench"),
        sharing=Sharing(engine=engine, learner=learner),
    )
    report(compared, json_file=json_file)


def report(compared: Sequence[Compared], *, json_file: Path | None) -> None:
    errors = median_errors(compared)
    console = Console()
    console.print(_table(compared))
    console.print(
        f"median error: {errors['tokens_per_second_off']:.1%} of tokens/s, "
        f"{errors['trained_tokens_per_second_off']:.1%} of trained tokens/s, "
        f"{100 * errors['learner_wait_off']:.1f} points of the learner's wait"
    )
    if json_file is not None:
        rows = [
            {"name": one.name, "measured": asdict(one.measured), "planned": asdict(one.planned) | {"lags": None}}
            for one in compared
        ]
        json_file.write_text(json.dumps({"runs": rows, "median_errors": errors}, indent=1) + "\n")


def _table(compared: Sequence[Compared]) -> Table:
    table = Table(title="runs, and what the planner says of them")
    table.add_column("")
    for name in ("tok/s", "planned", "trained tok/s", "planned", "learner waits", "planned"):
        table.add_column(name, justify="right")
    for one in compared:
        measured, planned = one.measured, one.planned
        table.add_row(
            one.name,
            f"{measured.tokens_per_second:,.0f}",
            f"{planned.tokens_per_second:,.0f} ({one.tokens_per_second_off:+.0%})",
            f"{measured.trained_tokens_per_second:,.0f}",
            f"{planned.trained_tokens_per_second:,.0f} ({one.trained_tokens_per_second_off:+.0%})",
            f"{measured.learner_wait_share:.1%}",
            f"{planned.learner_wait_share:.1%}",
        )
    return table
