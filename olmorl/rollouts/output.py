"""The files of a rollout: rows go to disk as they come, a kill loses none of them, and a file holds so many.

Files are `name.jsonl`, `name-00001.jsonl`, ...; the last one grows line by line. A parquet file cannot grow, so its
rows are collected as lines in `.name.parquet.rows` and turned into parquet when it is full, or at the end.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmorl.claim import claim
from olmorl.contract.errors import ConfigError, DataError
from olmorl.metrics.rollout_log import ROLLOUT_SCHEMA, RolloutRow

SUFFIXES = (".jsonl", ".parquet")
BATCH = 256  # rows read or written at once
_STRUCTS = {
    field.name: [inner.name for inner in field.type.value_type]
    for field in ROLLOUT_SCHEMA
    if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type)
}
_KNOWN_AGAIN = [
    *("prompt_id", "sample", "attempt", "prompt_token_ids", "token_ids", "finish_reason", "reward", "verdict")
]


class RolloutFiles:
    def __init__(self, path: Path, *, rows_per_file: int) -> None:
        """Raises ConfigError for a name that says no format."""
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"--out {path}: cannot tell the format; let it end in {' or '.join(SUFFIXES)}")
        self._path = path
        self._rows_per_file = rows_per_file
        self._number = 0
        self._num_rows = 0
        """in the file that grows"""
        self._file: BinaryIO | None = None
        self._claimed: BinaryIO | None = None
        """the settings file, locked by whoever writes this output"""

    @property
    def settings_file(self) -> Path:
        return self._path.with_name(f"{self._path.name}.settings.json")

    @property
    def summary_file(self) -> Path:
        return self._path.with_name(f"{self._path.name}.summary.json")

    @property
    def exists(self) -> bool:
        return self._sealed(0).exists() or self._growing(0).exists()

    def refuse_existing(self) -> None:
        """Raises ConfigError if there is an output of this name."""
        if self.exists:
            raise ConfigError(f"{self._path} is there already; continue it with --resume, or choose another --out")

    def begin(self, identity: dict[str, Any]) -> None:
        """A new output."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._claim()
        self.refuse_existing()
        self.settings_file.write_text(json.dumps(identity, indent=1) + "\n")

    def resume(self, identity: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows that are there, of each what a Tally needs; afterwards `write` goes on behind them.

        Raises ConfigError if the output was made with other settings, or is being written.
        """
        self._compare(identity)
        self._claim()
        while (path := self._find(self._number)) is not None:
            rows = 0
            for row in _read_parquet(path) if path.suffix == ".parquet" else self._read_lines(path):
                rows += 1
                yield row
            if path == self._growing(self._number) and self._find(self._number + 1) is None:
                self._num_rows = rows
                break
            self._number += 1

    def write(self, rows: Sequence[RolloutRow]) -> None:
        """They are in the hands of the system when this returns: a kill of this process does not touch them."""
        for row in rows:
            if self._num_rows >= self._rows_per_file:  # more, if it was resumed with fewer a file
                self._seal()
                self._number, self._num_rows = self._number + 1, 0
            self._file = self._file or self._growing(self._number).open("ab")
            self._file.write(json.dumps(row_as_json(row), ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            self._num_rows += 1
        if self._file is not None:
            self._file.flush()

    def close(self, *, complete: bool) -> None:
        try:
            if complete and self._num_rows:
                self._seal()
            elif self._file is not None:
                self._file.close()
                self._file = None
        finally:
            if self._claimed is not None:
                self._claimed.close()

    def _claim(self) -> None:
        """For as long as this process lives: two of them would write every sample twice, and into each other's rows."""
        refusal = f"{self._path} is being written by another process; wait for its end, or choose another --out"
        self._claimed = claim(self.settings_file, refusal=refusal)

    def _compare(self, identity: dict[str, Any]) -> None:
        try:
            before = json.loads(self.settings_file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot resume {self._path}: {self.settings_file} is not readable: {error}") from None
        if changes := list(_changes(before, identity)):
            raise ConfigError(
                f"cannot resume {self._path}: {'; '.join(changes)}; give the same, or choose another --out"
            )

    def _sealed(self, number: int) -> Path:
        stem = self._path.stem if number == 0 else f"{self._path.stem}-{number:05d}"
        return self._path.with_name(stem + self._path.suffix)

    def _growing(self, number: int) -> Path:
        sealed = self._sealed(number)
        return sealed if sealed.suffix == ".jsonl" else sealed.with_name(f".{sealed.name}.rows")

    def _find(self, number: int) -> Path | None:
        """A file that was being sealed counts as sealed once its parquet stands."""
        for path in (self._sealed(number), self._growing(number)):
            if path.exists():
                if path != self._growing(number):
                    self._growing(number).unlink(missing_ok=True)
                return path
        return None

    def _seal(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        growing, sealed = self._growing(self._number), self._sealed(self._number)
        if growing != sealed:
            partial = sealed.with_name(f".{sealed.name}.partial")
            with pq.ParquetWriter(partial, ROLLOUT_SCHEMA, compression="zstd", compression_level=1) as writer:
                for batch in _batches(_read_json_lines(growing)):
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=ROLLOUT_SCHEMA))
            os.replace(partial, sealed)
            growing.unlink()

    def _read_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """Whole lines; half of one, which a kill in the middle of a write leaves, is cut off."""
        end = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    row = json.loads(line)
                    yield {name: row[name] for name in _KNOWN_AGAIN}
                except (ValueError, KeyError, TypeError):
                    raise DataError(f"cannot resume: {path}:{number} is no row of a rollout") from None
        os.truncate(path, end)


def _changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in now.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            yield from _changes(old, value, f"{prefix}{key}.")
        elif old != value:
            yield f"{prefix}{key} was {old!r} and is now {value!r}"


def row_as_json(row: RolloutRow) -> dict[str, Any]:
    """As a row of the parquet file would be read: structs are objects, arrays lists."""
    plain: dict[str, Any] = {}
    for name in ROLLOUT_SCHEMA.names:
        value = getattr(row, name)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        elif name in _STRUCTS:
            value = [dict(zip(_STRUCTS[name], item, strict=True)) for item in value]
        plain[name] = value
    return plain


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=_KNOWN_AGAIN):
            yield from batch.to_pylist()


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
