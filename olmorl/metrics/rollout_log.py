"""Every sample of every step on disk, also the untrained ones, each with its fate.

One parquet file a step; the columns are read by other programs, so the schema is explicit and in one place. Columns
are built from numpy in bulk: building them row by row costs ten times as much and would be felt at every step.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import attrgetter
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

_IN_ORDER = attrgetter(*ROLLOUT_SCHEMA.names)
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
    table = pa.Table.from_arrays(_columns(rows), schema=ROLLOUT_SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.partial")
    pq.write_table(
        table,
        partial_path,
        compression="snappy",  # zstd makes it a sixth smaller, for as much time as all the rest takes
        use_dictionary=_REPEATING,
        write_statistics=False,  # a file is one group of rows: there is none to skip
    )
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


def _columns(rows: Sequence[RolloutRow]) -> list[pa.Array]:
    """In the schema's order. From buffers, for pa.array asks pandas what it is given, whose import takes a third of a
    second."""
    columns = zip(*map(_IN_ORDER, rows), strict=True) if rows else [()] * len(ROLLOUT_SCHEMA)
    return [_column(values, field.type) for values, field in zip(columns, ROLLOUT_SCHEMA, strict=True)]


def _column(values: tuple[Any, ...], column_type: pa.DataType) -> pa.Array:
    if not pa.types.is_list(column_type):
        return _plain(values, column_type)
    items = _structs(values, column_type.value_type) if _holds_structs(column_type) else _numbers(values, column_type)
    return pa.Array.from_buffers(column_type, len(values), [None, _offsets(values)], children=[items])


def _plain(values: Sequence[Any], value_type: pa.DataType) -> pa.Array:
    """Numbers or texts, some of which may be None."""
    valid = None
    if None in values:
        valid, absent = _bits(np.array([value is not None for value in values])), "" if value_type == pa.string() else 0
        values = [absent if value is None else value for value in values]
    if value_type != pa.string():
        buffers = [valid, pa.py_buffer(np.array(values, value_type.to_pandas_dtype()))]
    elif (text := "".join(values)).isascii():
        buffers = [valid, _offsets(values), pa.py_buffer(text.encode())]
    else:
        encoded = list(map(_utf8, values))
        buffers = [valid, _offsets(encoded), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(value_type, len(values), buffers)


def _numbers(values: Sequence[np.ndarray], list_type: pa.ListType) -> pa.Array:
    dtype = list_type.value_type.to_pandas_dtype()
    flat = np.concatenate([np.zeros(0, dtype), *values], dtype=dtype, casting="unsafe")
    return pa.Array.from_buffers(
        list_type.value_type, len(flat), [None, _bits(flat) if dtype == np.bool_ else pa.py_buffer(flat)]
    )


def _structs(values: Sequence[tuple[tuple[Any, ...], ...]], struct_type: pa.StructType) -> pa.Array:
    flat = list(chain.from_iterable(values))
    columns = zip(*flat, strict=True) if flat else [()] * struct_type.num_fields
    children = [_plain(column, field.type) for column, field in zip(columns, struct_type, strict=True)]
    return pa.Array.from_buffers(struct_type, len(flat), [None], children=children)


def _offsets(values: Sequence[Any]) -> pa.Buffer:
    """Where each begins, and where the last ends."""
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(list(map(len, values)), out=ends[1:])
    assert ends[-1] < 1 << 31, f"{ends[-1]:,} items of one column; a file holds 2^31 at most"
    return pa.py_buffer(ends.astype(np.int32))


def _bits(flags: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, in a ground truth or in what a verifier said
        return text.encode("utf-8", "backslashreplace")


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
