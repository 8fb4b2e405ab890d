"""Rows of prompt files as plain dicts, each with the place it came from, so that every complaint can name it."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from olmorl.contract.errors import DataError

Row = dict[str, object]
BLANK = b"\xef\xbb\xbf \t\r\n"  # with a byte order mark
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


def read_rows(file: str | Path) -> Iterator[tuple[str, Row]]:
    """Yield (place, row); `place` is file:line, or file:row where rows are no lines. Raises DataError."""
    path = Path(file)
    if not path.exists():
        raise DataError(f"{path}: no such data file (looked in {Path.cwd()})")
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        raise DataError(
            f"{path}: cannot read this as prompts; give a file that ends in "
            f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    count = 0
    for place, row in _read_parquet(path) if path.suffix == ".parquet" else _read_json(path):
        count += 1
        yield place, row
    if not count:
        raise DataError(f"{path}: the file holds no rows")


def _read_json(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows one a line, or an array of rows: both are found in files called .json."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            lines = _from_first_character(file)
            first = next(lines, (0, b""))
            may_be_array = path.name.endswith((".json", ".json.gz"))
            if may_be_array and first[1].lstrip(BLANK).startswith(b"["):
                yield from _parse_array(b"".join([first[1], *(line for _, line in lines)]), path)
                return
            for number, line in itertools.chain([first], lines):
                if line.strip():
                    place = f"{path}:{number}"
                    yield place, _as_row(_parse(line, place), place)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: broken gzip: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _from_first_character(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    begun = False
    for number, line in enumerate(lines, 1):
        begun = begun or bool(line.strip(BLANK))
        if begun:
            yield number, line


def _parse_array(content: bytes, path: Path) -> Iterator[tuple[str, Row]]:
    value = _parse(content, str(path), whole=True)
    assert isinstance(value, list), "it begins with a bracket"
    for number, row in enumerate(value, 1):
        yield f"{path}:row {number}", _as_row(row, f"{path}:row {number}")


def _parse(content: bytes, place: str, *, whole: bool = False) -> object:
    of = "file" if whole else "line"
    try:
        return json.loads(content.decode("utf-8-sig").rstrip("\r\n"))  # else a column is one of the next line
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the {of} is 0x{content[error.start]:02x}"
        raise DataError(f"{place}: not UTF-8 ({byte})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if whole else f"column {error.colno}"
        raise DataError(f"{place}: broken JSON at {where}: {error.msg}") from None
    except ValueError as error:  # a number of some thousand digits
        raise DataError(f"{place}: cannot be read: {str(error).partition(';')[0]}") from None
    except RecursionError:
        raise DataError(f"{place}: broken JSON: nested too deeply") from None


def _as_row(value: object, place: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{place}: a row must be a JSON object, not {type(value).__name__}")
    return value


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
