"""Every sample of every step on disk, also the untrained ones, each with its fate.

One parquet file a step; the columns are read by other programs, so the schema is explicit and in one place. Columns
are built from numpy in bulk: building them row by row costs ten times as much and would be felt at every step.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmorl.contract.errors import DataError
from olmorl.contract.generation import FinishReason, KvEvent, VersionSpan
from olmorl.metrics.ledger import Bin

_VERSION_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_KV_EVENT = pa.struct([("position", pa.int32()), ("version", pa.int32()), ("event", pa.string())])

ROLLOUT_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("step", pa.int32()),
        ("attempt", pa.int32()),
        ("data_source", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("raw_logprobs", pa.list_(pa.float32())),
        ("version_spans", pa.list_(_VERSION_SPAN)),
        ("kv_events", pa.list_(_KV_EVENT)),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("verdict", pa.string()),
        ("advantage", pa.float64()),
        ("fate", pa.string()),
        ("seed", pa.int64()),
        ("worker", pa.string()),
        ("t_admitted", pa.float64()),
        ("t_first_token", pa.float64()),
        ("t_finished", pa.float64()),
        ("t_trained", pa.float64()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("verdict_detail", pa.string()),
        ("learner_logprobs", pa.list_(pa.float32())),
    ]
)

_REPEATING = [  # worth a dictionary
    *("prompt_id", "data_source", "finish_reason", "verdict", "fate", "worker", "prompt", "ground_truth")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One sample; the fields are the file's columns, in order. Times are seconds since the epoch."""

    rollout_id: str
    prompt_id: str
    sample: int
    step: int
    attempt: int
    data_source: str | None
    prompt_token_ids: np.ndarray  # [P] int32
    token_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool
    logprobs: np.ndarray  # [T] float32
    raw_logprobs: np.ndarray  # [T] float32
    version_spans: tuple[VersionSpan, ...]
    kv_events: tuple[KvEvent, ...]
    text: str
    finish_reason: FinishReason
    reward: float | None
    verdict: Literal["scored", "timeout", "error", "unscorable"] | None
    advantage: float | None
    fate: Bin | None
    """None where nothing is trained"""
    seed: int | None
    worker: str
    t_admitted: float
    t_first_token: float | None
    t_finished: float | None
    t_trained: float | None
    prompt: str | None = None
    """what the model read"""
    ground_truth: str | None = None
    """JSON"""
    verdict_detail: str | None = None
    learner_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """[T], of the learner before the step that trained it, NaN where a token is not trained; empty if none is"""


assert [f.name for f in fields(RolloutRow)] == ROLLOUT_SCHEMA.names, "RolloutRow and ROLLOUT_SCHEMA differ"


def write_rollouts(path: Path, rows: Sequence[RolloutRow]) -> None:
    """Write one step's file; it appears whole or not at all."""
    columns = [_column(rows, field) for field in ROLLOUT_SCHEMA]
    table = pa.Table.from_arrays(columns, schema=ROLLOUT_SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.partial")
    pq.write_table(table, partial_path, compression="zstd", compression_level=1, use_dictionary=_REPEATING)
    os.replace(partial_path, path)


def rollout_files(run: Path) -> list[Path]:
    """Of a run's steps, in order. Raises DataError if it wrote none."""
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    if not files:
        raise DataError(
            f"{run} has no rollouts; it must be the directory of a run with logging.rollouts = true, some steps on"
        )
    return files


def read_rollouts(path: Path, **equal: str) -> list[RolloutRow]:
    """The rows of one step's file, or those with such a value in a column, as in `prompt_id="0_17"`."""
    filters = [(column, "=", value) for column, value in equal.items()]
    table = pq.read_table(path, schema=ROLLOUT_SCHEMA, filters=filters or None)
    columns = [_values(table.column(field.name).combine_chunks()) for field in ROLLOUT_SCHEMA]
    return [RolloutRow(**dict(zip(ROLLOUT_SCHEMA.names, row, strict=True))) for row in zip(*columns, strict=True)]


def _column(rows: Sequence[RolloutRow], field: pa.Field) -> pa.Array:
    values = [getattr(row, field.name) for row in rows]
    if not pa.types.is_list(field.type):
        try:
            return pa.array(values, field.type)
        except UnicodeEncodeError:  # half of a surrogate pair, in a ground truth or in what a verifier said
            return pa.array([v and v.encode("utf-8", "backslashreplace").decode() for v in values], field.type)
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    items = _structs(values, field.type.value_type) if _holds_structs(field.type) else _numbers(values, field.type)
    return pa.ListArray.from_arrays(offsets, items, type=field.type)


def _numbers(values: list[np.ndarray], list_type: pa.ListType) -> pa.Array:
    return pa.array(np.concatenate(values) if values else [], list_type.value_type)


def _structs(values: list[tuple[tuple[Any, ...], ...]], struct_type: pa.StructType) -> pa.Array:
    flat = list(chain.from_iterable(values))
    children = [pa.array([item[i] for item in flat], struct_type[i].type) for i in range(struct_type.num_fields)]
    return pa.StructArray.from_arrays(children, fields=list(struct_type))


def _values(column: pa.Array) -> list[Any]:
    """The column's values as RolloutRow holds them: numpy arrays, tuples of tuples, or plain Python."""
    if not pa.types.is_list(column.type):
        return column.to_pylist()
    if _holds_structs(column.type):
        return [tuple(tuple(item.values()) for item in items) for items in column.to_pylist()]
    ends = column.offsets.to_numpy()[1:]
    return np.split(column.values.to_numpy(zero_copy_only=False), ends[:-1]) if len(ends) else []


def _holds_structs(list_type: pa.ListType) -> bool:
    return pa.types.is_struct(list_type.value_type)
