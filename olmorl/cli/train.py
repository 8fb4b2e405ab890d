"""`olmorl train`: config in, run, table of results out."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from olmorl.config.dump import dump_toml
from olmorl.config.load import load_config


def print_plan(config_path: Path, overrides: Sequence[str]) -> None:
    """What would run, as a TOML file that can be run; starts nothing."""
    from olmorl.controller.placement import plan_placement

    config = load_config(config_path, overrides)
    print(dump_toml(config))
    print(f"# placement: {plan_placement(config).describe()}")


def train(config_path: Path, overrides: Sequence[str], *, resume: bool) -> None:
    config = load_config(config_path, overrides)
    from olmorl.controller.run import Run  # brings Ray

    with Run(config, resume=resume) as run:
        summary = run.train()
    print(format_summary(summary))


def format_summary(summary: Mapping[str, Any]) -> str:
    """Two aligned columns; nested tables get dotted names."""
    rows = list(_flatten(summary))
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            yield prefix + name, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        elif isinstance(value, int) and not isinstance(value, bool):
            yield prefix + name, f"{value:,}"
        else:
            yield prefix + name, str(value)
