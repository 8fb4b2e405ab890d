"""What the page reads of one run directory, kept in memory and read on as the files grow."""

import json
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from olmorl.contract.errors import ConfigError

LIVE_SECONDS = 60.0  # a run that wrote nothing for so long is not called live
TIMELINE_ROWS = 20_000  # kept of the timeline
_COLUMNS = ["token_ids", "version_spans", "step", "finish_reason", "fate", "reward"]


class Growing:
    """Whole lines of a jsonl file, each read once; a file that shrank or was replaced is read anew."""

    def __init__(self, path: Path, *, keep: int | None = None) -> None:
        self._path = path
        self._read = 0
        self._inode = 0
        self.rows: deque[dict[str, Any]] = deque(maxlen=keep)

    def refresh(self) -> None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self.rows.clear()
            self._read = 0
            return
        if stat.st_ino != self._inode or stat.st_size < self._read:
            self.rows.clear()
            self._read, self._inode = 0, stat.st_ino
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read += whole
        self.rows.extend(json.loads(line) for line in text[:whole].splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """Of one step's rollouts, what the histograms need; one entry a sample, ages one a trained token."""

    lengths: np.ndarray
    truncated: np.ndarray
    lags: np.ndarray
    """of a trained sample: version trained on minus the oldest version among its tokens"""
    ages: np.ndarray


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
        self.directory = directory
        self.summary: dict[str, Any] = {}
        self._samples: dict[int, tuple[int, StepSamples]] = {}
        self._metrics = Growing(self.directory / "metrics.jsonl")
        self._timeline = Growing(self.directory / "timeline.jsonl", keep=TIMELINE_ROWS)

    @property
    def name(self) -> str:
        return self.directory.name

    def refresh(self) -> None:
        self._metrics.refresh()
        self._timeline.refresh()
        try:
            self.summary = json.loads((self.directory / "summary.json").read_text())
        except FileNotFoundError:
            self.summary = {}

    @property
    def status(self) -> str:
        """finished, another exit reason, live, or silent."""
        if reason := self.summary.get("exit_reason"):
            return str(reason)
        return "live" if self._is_fresh else "silent"

    @property
    def _is_fresh(self) -> bool:
        return time.time() - self.last_sign < LIVE_SECONDS

    @property
    def state(self) -> tuple[object, ...]:
        """Equal as long as there is nothing new to show. Reads no file."""
        files = [self.directory / name for name in ("metrics.jsonl", "timeline.jsonl", "summary.json", "rollouts")]
        return (self._is_fresh, *(f.stat().st_mtime_ns if f.exists() else 0 for f in files))

    @property
    def last_sign(self) -> float:
        """When a file of it was last written, seconds since the epoch."""
        files = [self.directory / name for name in ("metrics.jsonl", "timeline.jsonl", "config.toml")]
        return max((f.stat().st_mtime for f in files if f.exists()), default=0.0)

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

    def rollout_steps(self) -> list[int]:
        return sorted(
            int(path.stem.removeprefix("step_")) for path in (self.directory / "rollouts").glob("step_*.parquet")
        )

    def rollouts_file(self, step: int) -> Path:
        return self.directory / "rollouts" / f"step_{step:06d}.parquet"

    def samples(self, count: int) -> list[StepSamples]:
        """Of the newest `count` steps that have rollouts; a file is read once."""
        found = []
        for step in self.rollout_steps()[-count:]:
            written = self.rollouts_file(step).stat().st_mtime_ns
            kept = self._samples.get(step)
            if kept is None or kept[0] != written:
                kept = self._samples[step] = (written, _step_samples(self.rollouts_file(step)))
            found.append(kept[1])
        return found


def _step_samples(path: Path) -> StepSamples:
    table = pq.read_table(path, columns=_COLUMNS)
    lengths = np.diff(table["token_ids"].combine_chunks().offsets.to_numpy())
    trained = np.asarray(table["fate"].to_pylist()) == "trained"
    lags, ages = [], []
    for spans, step in zip(
        table["version_spans"].filter(trained).to_pylist(), table["step"].filter(trained).to_pylist(), strict=True
    ):
        versions = np.array([span["version"] for span in spans])
        lags.append(step - 1 - versions.min())
        ages.append(np.repeat(step - 1 - versions, [span["end"] - span["start"] for span in spans]))
    return StepSamples(
        lengths=lengths,
        truncated=np.asarray(table["finish_reason"].to_pylist()) == "length",
        lags=np.array(lags, np.int64),
        ages=np.concatenate(ages) if ages else np.zeros(0, np.int64),
    )
