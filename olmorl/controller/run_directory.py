"""The run directory: where everything of a run lies, and what counts as complete.

A checkpoint is complete only when its COMPLETE marker stands; the marker is written last and synced to disk. On resume
the rows of metrics and rollouts beyond the checkpoint move to attempt_N/, so that one row a step remains.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import IO, Any

from olmorl.claim import claim
from olmorl.contract.errors import ConfigError

MARKER = "COMPLETE"
STEP_NAME = re.compile(r"step_\d+(\.parquet|\.safetensors)?")


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timeline_file(self) -> Path:
        return self.path / "timeline.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def received_file(self) -> Path:
        """How many tokens all attempts together have received so far, also those of steps that were rolled back."""
        return self.path / "logs" / "received_tokens"

    def rollouts_file(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def evals_file(self, version: int) -> Path:
        return self.path / "evals" / f"step_{version:06d}.parquet"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:06d}"

    def export(self, step: int) -> Path:
        return self.path / "export" / f"step_{step:06d}"

    def weights(self, version: int) -> Path:
        """Of a version that `checkpoint.keep_versions` keeps."""
        return self.path / "weights" / f"step_{version:06d}.safetensors"

    def find_weights(self, version: int) -> Path | None:
        """A file or folder that holds the weights of `version`; None if none is left."""
        places = (self.weights(version), self.export(version), self.checkpoint(version) / "learner")
        whole = (places[0].is_file(), places[1].is_dir(), (self.checkpoint(version) / MARKER).exists())
        return next((place for place, there in zip(places, whole, strict=True) if there), None)

    def keep_newest_weights(self, count: int) -> None:
        for old in _steps(self.path / "weights")[:-count]:
            old.unlink()

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt_{attempt}"

    def claim(self) -> IO[bytes]:
        """For one driver, until the file that is returned is closed. Raises ConfigError where another is at work."""
        refusal = f"another process runs {self.path}; wait for its end, end it, or choose another run.name"
        return claim(self.path / ".lock", refusal=refusal)

    def prepare(self, *, resume: bool) -> tuple[int, Path | None]:
        """Make ready for a new attempt: (attempt number, checkpoint to continue from or None).

        Without `resume`, a directory that already holds a run is refused, so that nothing is overwritten.
        """
        has_rows = self.metrics_file.exists() and self.metrics_file.stat().st_size > 0
        has_run = has_rows or any((self.path / "checkpoints").glob("step_*"))
        if has_run and not resume:
            raise ConfigError(
                f"{self.path} already holds a run; continue it with --resume, choose another run.name, or remove it"
            )
        for folder in ("checkpoints", "rollouts", "export", "logs"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        attempt = 1 + self._newest_attempt()
        self.logs(attempt).mkdir()
        checkpoint = self.newest_complete() if resume else None
        if has_run:
            self._set_aside(attempt - 1, beyond=_step_of(checkpoint) if checkpoint else -1)
        return attempt, checkpoint

    def _newest_attempt(self) -> int:
        """Also where somebody has cleared away old logs: what an attempt left was set aside by the one after it."""

        def newest(folder: Path) -> int:
            numbers = (path.name.removeprefix("attempt_") for path in folder.glob("attempt_*"))
            return max((int(number) for number in numbers if number.isdecimal()), default=0)

        set_aside = newest(self.path)
        return max(newest(self.path / "logs"), set_aside and set_aside + 1)

    def newest_complete(self) -> Path | None:
        return next(reversed(self._complete()), None)

    def newest_export(self) -> tuple[int, Path] | None:
        """(step, folder) of the newest model that stands there whole."""
        whole = [folder for folder in _steps(self.path / "export") if list(folder.glob("*.safetensors"))]
        newest = next(reversed(whole), None)
        return None if newest is None else (_step_of(newest), newest)

    def finished(self, steps: int) -> dict[str, Any] | None:
        """The summary of a run that has done all its `steps`; None while something of it is left to do."""
        newest = self.newest_complete()
        if newest is None or _step_of(newest) < steps or not self.summary_file.exists():
            return None
        summary = json.loads(self.summary_file.read_text())
        return summary if summary["exit_reason"] == "finished" else None

    def complete_checkpoint(self, step: int, *, keep: int) -> None:
        """Mark the checkpoint of `step` complete, point `latest` at it, drop all but the newest `keep`."""
        folder = self.checkpoint(step)
        _sync_tree(folder)
        write_atomically(folder / MARKER, f"{step}\n")
        latest = folder.parent / "latest"
        replacement = folder.parent / ".latest"
        replacement.unlink(missing_ok=True)
        replacement.symlink_to(folder.name)
        replacement.replace(latest)
        for old in self._complete()[:-keep]:
            (old / MARKER).unlink()
            shutil.rmtree(old)

    def _complete(self) -> list[Path]:
        """Oldest first."""
        return [folder for folder in _steps(self.path / "checkpoints") if (folder / MARKER).exists()]

    def _set_aside(self, attempt: int, *, beyond: int) -> None:
        """Move rows of steps > `beyond`, and half-written checkpoints, to attempt_<attempt>/."""
        aside = self.path / f"attempt_{attempt}"
        for folder in ("rollouts", "evals", "checkpoints", "weights", "export"):
            for entry in _steps(self.path / folder):
                if _step_of(entry) > beyond or (folder == "checkpoints" and not (entry / MARKER).exists()):
                    (aside / folder).mkdir(parents=True, exist_ok=True)
                    entry.rename(aside / folder / entry.name)
        if self.metrics_file.exists():
            kept: list[str] = []
            moved: list[str] = []
            for line in self.metrics_file.read_text().splitlines(keepends=True):
                (kept if _metrics_step(line) <= beyond else moved).append(line)
            if moved:
                aside.mkdir(exist_ok=True)
                (aside / "metrics.jsonl").write_text("".join(moved))
                write_atomically(self.metrics_file, "".join(kept))
        self.summary_file.unlink(missing_ok=True)


def _steps(folder: Path) -> list[Path]:
    """What is of a step, by step; what is still written, or a copy somebody made, has another name."""
    named = [path for path in folder.glob("step_*") if STEP_NAME.fullmatch(path.name)]
    return sorted(named, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _metrics_step(line: str) -> float:
    """A line cut short by a crash counts as beyond every checkpoint."""
    try:
        return json.loads(line)["progress/step"]
    except (json.JSONDecodeError, KeyError):
        return float("inf")


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Whole or not at all, also across a crash."""
    part = path.with_name(path.name + ".part")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _sync_tree(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
