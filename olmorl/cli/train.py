"""`olmorl train`: config in, run, table of results out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from olmorl.config.dump import dump_toml
from olmorl.config.load import load_config
from olmorl.contract.errors import ConfigError

_CLUSTER = re.compile(r"(\d+)x(\d+)x(\d+)")


def print_plan(config_path: Path, overrides: Sequence[str], cluster: str | None = None) -> None:
    """What would run, as a TOML file that can be run; starts nothing.

    `cluster`, "NODESxCPUSxGPUS", stands for this machine; a run that it cannot hold is a PlacementError.
    """
    from olmorl.controller.placement import Node, plan_placement

    config = load_config(config_path, overrides)
    if cluster is None:
        placement = plan_placement(config)
    else:
        count, cpus, gpus = _read_cluster(cluster)
        nodes = [Node(f"node-{number}", cpus, gpus) for number in range(count)]
        placement = plan_placement(config, nodes)
        placement.check(nodes)
    print(dump_toml(config))
    print(f"# placement: {placement.describe()}")


def _read_cluster(text: str) -> tuple[int, int, int]:
    """(nodes, CPUs of each, GPUs of each)"""
    match = _CLUSTER.fullmatch(text)
    if match is None:
        raise ConfigError(f"--cluster is {text!r}; it must be NODESxCPUSxGPUS, such as 9x96x8")
    nodes, cpus, gpus = (int(number) for number in match.groups())
    return nodes, cpus, gpus


def train(config_path: Path, overrides: Sequence[str], *, resume: bool) -> None:
    config = load_config(config_path, overrides)
    from olmorl.controller.run import Run  # brings Ray
    from olmorl.controller.run_directory import RunDirectory

    with Run(config, resume=resume) as run:
        summary = run.train()
    print(format_summary(summary))
    export = RunDirectory(config.run.directory).export(summary.get("steps", 0))
    if export.is_dir():
        print(f"\nthe trained model, a Hugging Face folder: {export}")


def format_summary(summary: Mapping[str, Any]) -> str:
    """Two aligned columns; nested tables get dotted names. What is unknown, and bins that stayed empty, are left out.

    `waste` says where every token ended, the trained ones too: it is shown as the parts of `tokens`.
    """
    shown = {name: value for name, value in summary.items() if value is not None and name != "waste"}
    bins = {name: tokens for name, tokens in summary.get("waste", {}).items() if tokens}
    rows = [*_flatten(shown), *_flatten(bins, "tokens.")]
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
