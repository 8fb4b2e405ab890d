"""Weights & Biases: the same metrics, on their own x axis, one row a step.

wandb is a convenience, so it may fail without the run failing: a start that does not work is one warning and no sink.

The axis is `progress/step`, and wandb's own step is the same number: both only grow, over all attempts of a run. wandb
takes nothing back, so a step that a resume repeats is not logged again: there it stays as it was the first time, and
metrics.jsonl has what survived. What wandb lost when a run was killed is logged from there.
"""

import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from olmorl.metrics.jsonl_sink import read_metrics
from olmorl.metrics.rollout_log import RolloutRow
from olmorl.metrics.wandb_file import last_step

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger(__name__)

TABLE_ROWS = 16  # of each set
TABLE_COLUMNS = ("version", "prompt_id", "prompt", "text", "ground_truth", "reward", "verdict", "verdict_detail")

WandbMode = Literal["auto", "online", "offline", "disabled"]


class WandbSink:
    """When wandb's own process dies, one warning says so, and the run goes on without it."""

    def __init__(self, run: "Run", *, last_step: int = -1) -> None:
        """`last_step`: the last that wandb already has."""
        self._run: Run | None = run
        self._last = last_step
        run.define_metric("progress/step")
        run.define_metric("*", step_metric="progress/step")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if step > self._last:
            self._last = step
            self._try(lambda run: run.log({**metrics, "progress/step": step}, step=step, commit=True))

    def write_samples(self, version: int, samples: Mapping[str, Sequence[RolloutRow]]) -> None:
        """A table for each set, in the row of the step: the first sample of its first prompts, the same at every
        version."""
        if version <= self._last:
            return
        import wandb

        tables = {}
        for name, rows in samples.items():
            shown = [_table_row(row, version) for row in rows if row.sample == 0][:TABLE_ROWS]
            tables[f"eval/{name}/samples"] = wandb.Table(columns=list(TABLE_COLUMNS), data=shown)
        self._try(lambda run: run.log(tables, step=version, commit=False))

    def close(self) -> None:
        self._try(lambda run: run.finish())
        self._run = None

    def _try(self, work: "Callable[[Run], object]") -> None:
        if self._run is None:
            return
        try:
            work(self._run)
        except Exception as error:
            self._run = None
            logger.warning(
                "wandb takes no more (%s: %s); the run goes on without it, metrics are in metrics.jsonl",
                type(error).__name__,
                error,
            )


def _table_row(row: RolloutRow, version: int) -> list[Any]:
    values = {**{field.name: getattr(row, field.name) for field in fields(row)}, "version": version}
    return [values[column] for column in TABLE_COLUMNS]


def open_wandb(
    directory: Path, *, project: str, name: str, mode: WandbMode, config: dict[str, Any]
) -> WandbSink | None:
    """Start wandb for the run of `directory`, or go on with the one it already has. None when off or not startable."""
    resolved = resolve_mode(mode)
    if resolved == "disabled":
        return None
    try:
        import wandb  # its import costs half a second

        run = wandb.init(
            project=project,
            name=name,
            id=_run_id(directory),
            dir=directory,
            mode=resolved,
            resume="allow" if resolved == "online" else None,  # offline there is nothing to ask
            config=config,
            settings=wandb.Settings(console="off", silent=True, init_timeout=30),
        )
        sink = WandbSink(run, last_step=max(run.starting_step - 1, last_step(directory)))
        for step, row in _rows(directory / "metrics.jsonl"):
            sink.write(step, row)
    except Exception as error:  # whatever it is, the run is worth more than its curves
        logger.warning(
            "wandb did not start (%s: %s); the run goes on without it, metrics are in metrics.jsonl. "
            "logging.wandb = 'offline' needs no network",
            type(error).__name__,
            error,
        )
        return None
    return sink


def _rows(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """What the run has so far, as it was written."""
    for row in read_metrics(path) if path.exists() else ():
        yield row["progress/step"], {name: math.nan if value is None else value for name, value in row.items()}


def resolve_mode(mode: WandbMode) -> Literal["online", "offline", "disabled"]:
    """`auto` follows WANDB_MODE, else goes online exactly when there is a key."""
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE", "")
    if wanted in ("online", "offline", "disabled"):
        return wanted  # type: ignore[return-value]
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


def _run_id(directory: Path) -> str:
    """The id kept in the run directory, so that a resumed run continues its own curves."""
    path = directory / "wandb" / "run_id"
    if path.exists():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    run_id = uuid.uuid4().hex[:12]
    path.write_text(run_id + "\n")
    return run_id
