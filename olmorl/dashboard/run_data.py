"""What the page reads of one run directory, kept in memory and read on as the files grow."""

import json
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import OBSERVED

LIVE_SECONDS = 60.0  # a run that wrote nothing for so long is not called live
TIMELINE_ROWS = 20_000  # kept of the timeline
RolloutsOf = Literal["rollouts", "evals"]
"""the folder: of steps, or of evaluations of the version that a step made"""
_COLUMNS = ["version_spans", "step", "finish_reason", "fate"]
_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


class Growing:
    """Whole lines of a jsonl file, each read once; a file that shrank or was replaced is read anew. What is no JSON
    object, as a full disk leaves, is counted and left out."""

    def __init__(self, path: Path, *, keep: int | None = None) -> None:
        self.path = path
        self._keep = keep
        self._read = 0
        self._inode = 0
        self.rows: deque[dict[str, Any]] = deque(maxlen=keep)
        self.unreadable = 0

    def refresh(self) -> None:
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            self._begin(0)
            return
        if stat.st_ino != self._inode or stat.st_size < self._read:
            self._begin(stat.st_ino)
        with self.path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read += whole
        lines = text[:whole].splitlines()
        for line in lines if self._keep is None else lines[-self._keep :]:
            row = _object(line)
            if row is None:
                self.unreadable += 1
            else:
                self.rows.append(row)

    def _begin(self, inode: int) -> None:
        self.rows.clear()
        self._read, self._inode, self.unreadable = 0, inode, 0


def _object(text: str | bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """Of one step's rollouts, what the histograms need."""

    lengths: np.ndarray
    """of each sample, the tokens that the policy drew"""
    truncated: np.ndarray
    lags: np.ndarray
    """[n] trained samples whose oldest token is n versions older than the policy that was trained"""
    ages: np.ndarray
    """[n] tokens of trained samples, of that age"""


class RunData:
    """One run. `refresh` reads what is new; everything else is memory.

    Raises:
        ConfigError: `directory` is no run directory.
    """

    def __init__(self, directory: Path) -> None:
        if not (directory / "metrics.jsonl").exists() and not (directory / "config.toml").exists():
            raise ConfigError(
                f"{directory} is no run directory: it has neither config.toml nor metrics.jsonl; give one that "
                "olmorl train has written, such as outputs/quickstart"
            )
        self.directory = directory.absolute()
        self.name = directory.resolve().name
        self.summary: dict[str, Any] = {}
        self._samples: dict[int, tuple[int, StepSamples]] = {}
        self._metrics = Growing(self.directory / "metrics.jsonl")
        self._timeline = Growing(self.directory / "timeline.jsonl", keep=TIMELINE_ROWS)
        self._broken: set[str] = set()

    def refresh(self) -> None:
        """What was read stays when the directory is renamed or removed."""
        if not self.directory.is_dir():
            return
        self._metrics.refresh()
        self._timeline.refresh()
        self._broken.clear()
        path = self.directory / "summary.json"
        found = _object(path.read_bytes()) if path.exists() else {}
        if found is None:
            self._broken.add(path.name)
        self.summary = found or {}

    @property
    def unreadable(self) -> list[str]:
        """Files that are damaged, and how many lines of those of lines."""
        lines = [f"{f.unreadable} lines of {f.path.name}" for f in (self._metrics, self._timeline) if f.unreadable]
        return [*lines, *sorted(self._broken)]

    @property
    def status(self) -> str:
        """finished, another exit reason, live, silent, or gone with its directory."""
        if not self.directory.is_dir():
            return "gone"
        if reason := self.summary.get("exit_reason"):
            return str(reason)
        return "live" if self._is_fresh else "silent"

    @property
    def _is_fresh(self) -> bool:
        return time.time() - self.last_sign < LIVE_SECONDS

    @property
    def state(self) -> tuple[object, ...]:
        """Equal as long as there is nothing new to show. Reads no file."""
        return (
            self._is_fresh,
            *map(self._written, ("metrics.jsonl", "timeline.jsonl", "summary.json", "rollouts", "evals")),
        )

    @property
    def last_sign(self) -> float:
        """When a file of it was last written, seconds since the epoch."""
        return max(map(self._written, ("metrics.jsonl", "timeline.jsonl", "config.toml"))) / 1e9

    def _written(self, name: str) -> int:
        """When, in nanoseconds; 0 for what is not there."""
        try:
            return (self.directory / name).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was measured."""
        rows = [row for row in self._metrics.rows if row.get(name) is not None]
        return [int(row["progress/step"]) for row in rows], [row[name] for row in rows]

    def names(self, prefix: str) -> list[str]:
        found = dict.fromkeys(name for row in self._metrics.rows for name in row if name.startswith(prefix))
        return list(found)

    def last(self, name: str) -> float | None:
        return next((row[name] for row in reversed(self._metrics.rows) if row.get(name) is not None), None)

    @property
    def last_step(self) -> int:
        return int(self._metrics.rows[-1]["progress/step"]) if self._metrics.rows else 0

    def timeline(self, seconds: float) -> list[dict[str, Any]]:
        """Rows of the last so many seconds before the newest one."""
        rows = self._timeline.rows
        start = rows[-1]["t"] - seconds if rows else 0.0
        return [row for row in rows if row["t"] >= start]

    def rollout_steps(self, of: RolloutsOf = "rollouts") -> list[int]:
        names = (path.name for path in (self.directory / of).glob("step_*.parquet"))
        return sorted(int(found[1]) for name in names if (found := _STEP_FILE.fullmatch(name)))

    def rollouts_file(self, step: int, of: RolloutsOf = "rollouts") -> Path:
        return self.directory / of / f"step_{step:06d}.parquet"

    def samples(self, count: int) -> list[StepSamples]:
        """Of the newest `count` steps whose rollouts can be read; a file is read once."""
        kept, self._samples = self._samples, {}
        for step in self.rollout_steps()[-count:]:
            path = self.rollouts_file(step)
            try:
                written = path.stat().st_mtime_ns
                known = kept.get(step)
                self._samples[step] = known if known and known[0] == written else (written, _step_samples(path))
            except (OSError, pa.ArrowException):  # damaged, or just set aside by a resume
                self._broken.add(f"{path.parent.name}/{path.name}")
        return [samples for _, samples in self._samples.values()]


def _step_samples(path: Path) -> StepSamples:
    # read_table and to_numpy would import pandas: a second or more before the first chart.
    table = pq.ParquetFile(path).read(columns=_COLUMNS)
    spans = table["version_spans"].combine_chunks()
    sample_S = np.repeat(np.arange(len(spans)), np.diff(np.from_dlpack(spans.offsets)))
    parts: list[Any] = spans.flatten().flatten()
    version_S, start_S, end_S = (np.asarray(np.from_dlpack(part), np.int64) for part in parts)
    tokens_S = np.where(version_S == OBSERVED, 0, end_S - start_S)
    trained = np.array(table["fate"].to_pylist(), object) == "trained"
    step = np.asarray(np.from_dlpack(table["step"].combine_chunks()), np.int64)
    age_S = np.maximum(step[sample_S] - 1 - version_S, 0)
    counted_S = trained[sample_S] & (tokens_S > 0)
    oldest = np.full(len(spans), -1)
    np.maximum.at(oldest, sample_S[counted_S], age_S[counted_S])
    return StepSamples(
        lengths=np.bincount(sample_S, weights=tokens_S, minlength=len(spans)).astype(np.int64),
        truncated=np.array(table["finish_reason"].to_pylist(), object) == "length",
        lags=np.bincount(oldest[oldest >= 0]),
        ages=np.bincount(age_S[counted_S], weights=tokens_S[counted_S]).astype(np.int64),
    )
