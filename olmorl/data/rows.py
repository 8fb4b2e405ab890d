"""Rows of prompt files as plain dicts, each with the place it came from, so that every complaint can name it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from olmorl.contract.errors import DataError

Row = dict[str, object]
SUFFIXES = (".jsonl", ".parquet")


def read_rows(file: str | Path) -> Iterator[tuple[str, Row]]:
    """Yield (place, row); `place` is file:line, or file:row for parquet. Raises DataError."""
    path = Path(file)
    if not path.exists():
        raise DataError(f"{path}: no such data file (looked in {Path.cwd()})")
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise DataError(f"{path}: cannot read this as prompts; give a file that ends in {' or '.join(SUFFIXES)}")
    count = 0
    for place, row in _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path):
        count += 1
        yield place, row
    if not count:
        raise DataError(f"{path}: the file holds no rows")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{path}:{number}"
                    yield place, _parse_line(line, place)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _parse_line(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x})"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: broken JSON at column {error.colno}: {error.msg}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row must be a JSON object, not {type(row).__name__}")
    return row


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            number = 0
            for batch in parquet.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None
