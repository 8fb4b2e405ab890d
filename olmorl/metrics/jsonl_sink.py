"""metrics.jsonl: one object a step, whole lines only, readable while the run goes on."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from olmorl.contract.errors import DataError
from olmorl.metrics.rollout_log import RolloutRow


class JsonlSink:
    """Appends. What is not finite is written as null, for JSON has no NaN."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        row = {"progress/step": step, **{name: _finite(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def write_samples(self, version: int, samples: Mapping[str, Sequence[RolloutRow]]) -> None:
        """They have a file of their own."""

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file; a last line still being written is left out.

    Raises:
        DataError: there is no such file, or a line of it is no row.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith("\n"):
                    yield _row(line, where=f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _row(line: str, *, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: no JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("progress/step"), int):
        raise DataError(f"{where}: no row of metrics, which has progress/step")
    return row


def drop_torn_line(path: Path) -> None:
    """Cut off what a killed process left of its last line, so that the next one does not continue it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        whole = end
        while whole > 0:
            start = max(0, whole - 4096)
            file.seek(start)
            newline = file.read(whole - start).rfind(b"\n")
            if newline >= 0:
                whole = start + newline + 1
                break
            whole = start
        if whole < end:
            file.truncate(whole)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
