"""Is what one config asks for really there: model, data, devices?"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from olmorl.cli.finding import Finding
from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, PlacementError


def check_run(config_path: Path) -> Iterator[Finding]:
    try:
        config = load_config(config_path)
    except ConfigError as error:
        yield Finding("fail", str(error))
        return
    yield Finding("ok", f"{config_path} is a valid config")
    yield check_model(config.model.path)
    files = [*config.data.train, *([config.eval.data] if config.eval.data else [])]
    for file in files:
        yield check_data(Path(file))
    yield _placement(config)


def check_model(path: str) -> Finding:
    folder = Path(path)
    if not folder.exists():
        fix = "correct model.path; or, if it is a hub id, see that it is in the cache or the hub can be reached"
        return Finding("warn", f"model {path!r} is no folder here, so it is taken as a hub id", fix)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        return Finding("fail", f"model folder {path} lacks {', '.join(missing)}", "point model.path at a whole one")
    try:
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        return Finding("fail", f"{folder / 'config.json'} cannot be read: {error}", "copy the model folder anew")
    return Finding("ok", f"model {path} ({model_type})")


def check_data(path: Path) -> Finding:
    """Readable, and not empty; the run itself looks at every row."""
    try:
        columns = _parquet_columns(path) if path.suffix == ".parquet" else _jsonl_columns(path)
    except (OSError, ValueError) as error:
        return Finding("fail", f"data {path} cannot be read: {error}", "correct the path, or write the file anew")
    if not columns:
        return Finding("fail", f"data {path} holds no row", "it needs at least one prompt")
    return Finding("ok", f"data {path} (columns: {', '.join(columns)})")


def _jsonl_columns(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "{}")
    row = json.loads(first)
    if not isinstance(row, dict):
        raise ValueError(f"its first line is no JSON object but {first.strip()[:60]!r}")
    return list(row)


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    return file.schema_arrow.names if file.metadata.num_rows else []


def _placement(config: Config) -> Finding:
    from olmorl.controller.placement import count_gpus, plan_placement

    placement = plan_placement(config)
    if config.cluster.address is not None:
        return Finding("ok", f"placement: {placement.describe()} (on the cluster at {config.cluster.address})")
    try:
        placement.check({"CPU": os.cpu_count() or 1, "GPU": count_gpus()})
    except PlacementError as error:
        return Finding("fail", str(error))
    return Finding("ok", f"placement: {placement.describe()}")
