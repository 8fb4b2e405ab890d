"""Is what one config asks for really there: model, data, devices?"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from olmorl.cli.finding import Finding
from olmorl.cli.machine_checks import check_disk
from olmorl.cli.shadowed import find_shadowed
from olmorl.cli.verifier_checks import check_verdicts, load_verifiers
from olmorl.config.data_sections import RewardSection, SourceSection
from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, ModelError, OlmoRLError, PlacementError
from olmorl.controller.cluster import cluster_address
from olmorl.controller.placement import Node, plan_placement, this_machine
from olmorl.data.dialect import assign_verifiers
from olmorl.data.source import read_source
from olmorl.rewards.verifier import canonical_name, check_keys, choose_verifiers


def check_run(config_path: Path, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    try:
        config = load_config(config_path, overrides)
    except ConfigError as error:
        yield Finding("fail", str(error))
        return
    yield Finding("ok", f"{config_path} is a valid config")
    yield check_output(config.run.directory)
    if not find_shadowed():  # the engine says which models it knows
        yield check_model(config.model.path)
    reward, named = config.reward, set[str | None]()
    own = reward.model_copy(update={"verifier": None})  # of an evaluation set goes first
    sources: list[tuple[SourceSection, RewardSection]] = [(source, reward) for source in config.data.train]
    sources += [(source, reward if source.verifier is None else own) for source in config.eval.data]
    for source, judged_by in sources:
        finding = check_data(source, judged_by, named)
        yield finding
        if finding.status == "ok":
            yield from check_verdicts(source, judged_by)
    yield from check_reward(reward, named)
    if cluster_address(config.cluster.address) is None:
        yield _placement(config)


def check_output(directory: Path) -> Finding:
    """May the run write there, and is there room? The nearest folder that stands there tells."""
    directory = directory.absolute()
    there = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("fail", f"run directory {directory}: {there} cannot be written to", "set run.output_dir")
    return check_disk(there, what=f"run directory {directory}")


def check_model(path: str) -> Finding:
    folder = Path(path)
    if not folder.exists():
        try:
            validate_repo_id(path)
        except HFValidationError:
            return Finding(
                "fail", f"model folder {path} does not exist, and no hub id looks like it", "correct model.path"
            )
        fix = "correct model.path; or, if it is a hub id, see that it is in the cache or the hub can be reached"
        return Finding("warn", f"model {path!r} is no folder here, so it is taken as a hub id", fix)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        return Finding("fail", f"model folder {path} lacks {', '.join(missing)}", "point model.path at a whole one")
    from inference.model.architecture import read_architecture

    try:
        read_architecture(folder)
    except ModelError as error:
        return Finding("fail", f"model: {error}", "choose another model, or copy the model folder anew")
    return Finding("ok", f"model {path}")


def check_data(source: SourceSection, reward: RewardSection, named: set[str | None]) -> Finding:
    """Its first row is read as the run will read it, and judged by whom, which is added to `named`; one's own verifiers
    are loaded. The run itself looks at every row."""
    try:
        place, example = next(iter(read_source(source)))
        checks = example.checks
        if reward.verifier is not None:
            checks = assign_verifiers(checks, reward.verifier, place=place)
        named.update(check.verifier for check in checks)
        names = choose_verifiers(reward.remap.get(check.verifier or "", check.verifier) for check in checks)
        own = [name for name in names if ":" in canonical_name(name)]
        load_verifiers(own, reward)
    except StopIteration:
        return Finding("fail", f"data: {source.path} holds no rows", "correct the path or the data")
    except OlmoRLError as error:  # also of a process that loads a verifier and does not come up
        return Finding("fail", f"data {source.path}: {error}", "correct the path, the file or the verifier")
    return Finding("ok", f"first row of {source.path} (source {example.data_source}, verifier {', '.join(names)})")


def check_reward(reward: RewardSection, named: set[str | None]) -> Iterator[Finding]:
    """Keys that are of no row. `named` is what first rows say, so only an unknown name is surely wrong."""
    fix = "correct the name, or leave it out: the run refuses a key that is of no row"
    try:
        for name in reward.weights:
            canonical_name(name)
    except ConfigError as error:
        yield Finding("fail", f"reward.weights: {error}", fix)
        return
    try:
        check_keys(named, weights=reward.weights, remap=reward.remap)
    except ConfigError as error:
        yield Finding("warn", f"by the first row of each source, {error}", fix)


def check_split(nodes: Sequence[Node]) -> Finding:
    """Of cluster.split = "auto"; the plan itself, which takes a while, is the run's to make."""
    from olmorl.planner.split import device_to_split  # reaches into the engine, which may be shadowed

    try:
        kind = device_to_split(nodes)
    except ConfigError as error:
        return Finding("fail", str(error))
    return Finding("ok", f"placement: as the planner splits {sum(node.gpus for node in nodes):g} {kind}")


def _placement(config: Config) -> Finding:
    if config.cluster.split == "auto":
        return check_split([this_machine()])
    placement = plan_placement(config)
    try:
        placement.check([this_machine(cpus=placement.cpus)])
    except PlacementError as error:
        return Finding("fail", str(error))
    return Finding("ok", f"placement: {placement.describe()}")
