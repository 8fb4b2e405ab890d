"""`olmorl train`: config in, run, table of results out."""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from olmorl.config.dump import dump_toml
from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, PlacementError
from olmorl.contract.training import check_learner_dtype
from olmorl.controller.placement import Node, Placement, plan_placement, this_machine
from olmorl.controller.run_directory import RunDirectory

_CLUSTER = re.compile(r"(\d+)x(\d+)x(\d+)(?::(\w+))?")


def print_plan(config_path: Path, overrides: Sequence[str], cluster: str | None = None) -> None:
    """Does it fit, and what would run, as a TOML file that can be run; starts nothing.

    `cluster`, "NODESxCPUSxGPUS" or "NODESxCPUSxGPUS:KIND", stands for this machine; a run that it cannot hold is a
    PlacementError.
    """
    nodes = [this_machine()] if cluster is None else _read_cluster(cluster)
    config = _load(config_path, overrides, lambda _: nodes)
    placement = plan_placement(config, nodes)
    try:
        memory = _check_fit(config, placement, nodes)
        verdict = f"it fits {'this machine' if cluster is None else cluster}"
    except PlacementError as error:
        if cluster is not None:
            raise PlacementError(f"it does not fit {cluster}: {error}") from None
        verdict, memory = f"it does not fit this machine: {error}", []
    further = f"model, data and verifiers are not looked at: olmorl doctor {config_path}"
    for line in (verdict, f"placement: {placement.describe()}", *memory, further):
        print(f"# {line}")
    print(f"\n{dump_toml(config)}", end="")


def _check_fit(config: Config, placement: Placement, nodes: Sequence[Node]) -> list[str]:
    """What is to be said of memory. Raises PlacementError: too few devices, or too small ones."""
    placement.check(nodes)
    if not placement.gpus:
        return []
    from olmorl.planner.memory import holdings  # reaches into the engine, which may be shadowed

    try:
        found = holdings(config, placement, nodes)
    except ConfigError as error:
        return [f"memory: not looked at: {error}"]
    if too_large := [str(holding) for holding in found if not holding.fits]:
        raise PlacementError("; ".join(too_large))
    if not found:
        return ["memory: not looked at: no GPU of a kind that is known; --cluster 9x96x8:H100 names one"]
    return [f"memory: {holding}; activations and updates come on top" for holding in found]


def _read_cluster(text: str) -> list[Node]:
    match = _CLUSTER.fullmatch(text)
    if match is None:
        raise ConfigError(f"--cluster is {text!r}; it must be NODESxCPUSxGPUS, such as 9x96x8 or 9x96x8:H100")
    nodes, cpus, gpus = (int(number) for number in match.groups()[:3])
    return [Node(f"node-{number}", cpus, gpus, match[4] if gpus else None) for number in range(nodes)]


def _load(config_path: Path, overrides: Sequence[str], nodes: Callable[[Config], Sequence[Node]]) -> Config:
    """With the planner's split of `nodes`, if it asks for that."""
    config = load_config(config_path, overrides)
    check_learner_dtype(config.model.dtype)
    if config.cluster.split == "given":
        return config
    from olmorl.planner.split import split

    there = nodes(config)
    print(f"planning how to split {sum(node.gpus for node in there):g} GPUs", file=sys.stderr)
    return split(config, there)


def _nodes(config: Config) -> Sequence[Node]:
    """Of the cluster that the run will join or, on this machine, start."""
    from olmorl.controller.cluster import Cluster, cluster_address

    address = cluster_address(config.cluster.address)
    if address is None:
        return [this_machine()]
    with tempfile.TemporaryDirectory() as folder, Cluster(address=address, cpus=0, log_dir=Path(folder)) as cluster:
        cluster.wait_for_nodes(config.cluster.nodes, timeout=config.cluster.start_timeout_seconds)
        return cluster.nodes()


def train(config_path: Path, overrides: Sequence[str], *, resume: bool) -> None:
    config = _load(config_path, overrides, _nodes)
    from olmorl.controller.run import Run  # brings Ray

    directory = RunDirectory(config.run.directory)
    try:
        with Run(config, resume=resume) as run:
            summary = run.train()
    except KeyboardInterrupt:
        print(_where_it_stands(directory), file=sys.stderr)
        raise
    print(format_summary(summary))
    export = directory.export(summary.get("steps", 0))
    if export.is_dir():
        print(f"\nthe trained model, a Hugging Face folder: {export}")


def _where_it_stands(directory: RunDirectory) -> str:
    """Of a run that was interrupted: from where --resume goes on, so that it is seen what is lost."""
    newest = directory.newest_complete() if directory.path.exists() else None
    done = "nothing was trained"
    if directory.summary_file.exists():  # else it was still starting
        done = f"{json.loads(directory.summary_file.read_text())['steps']} steps are trained"
    if newest is None:
        return f"{done}, and no checkpoint is complete: --resume begins anew (see checkpoint.every)"
    return f"{done}; --resume goes on from the newest checkpoint, {newest.name}"


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
