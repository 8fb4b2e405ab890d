"""What a person sees while a run goes on: one live line on a terminal, a plain line now and then without one."""

import math
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from olmorl.metrics.duration import duration
from olmorl.metrics.rollout_log import RolloutRow

_LINES_WITHOUT_TERMINAL = 40  # in a whole run
_ROOM_FOR_BAR = 120  # columns


class ConsoleSink:
    """`total_steps` and the time since the first row set the ETA: what starting took is no part of it. `first_step` is
    the last step already done when a run is resumed.

    On a terminal a line is redrawn in place at each step, and once a second so that the clock moves while a step
    takes long; what others print meanwhile scrolls above it.
    """

    def __init__(self, total_steps: int, *, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = total_steps
        self._first = first_step
        self._every = max(1, total_steps // _LINES_WITHOUT_TERMINAL)
        self._began: tuple[int, float] | None = None
        """step and time of the first row"""
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                *[BarColumn(bar_width=16)][: self._console.width >= _ROOM_FOR_BAR],
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[status]}", table_column=Column(ratio=1, no_wrap=True)),  # which is cut first
                console=self._console,
                refresh_per_second=1,
                expand=True,
            )
            self._task = self._progress.add_task(
                "train", total=total_steps, completed=first_step, status="starting", left=""
            )
            self._progress.start()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._began = self._began or (step, time.monotonic())
        for line in _evaluations(step, metrics):
            self._say(line)
        if "reward/mean" not in metrics:
            return
        status, left = " · ".join(_status(metrics)), self._left(step)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, status=status, left=left)
        elif step == self._first + 1 or step % self._every == 0 or step == self._total:
            self._say(f"step {step}/{self._total} · {status}" + (f" · {left}" if left else ""))

    def write_samples(self, version: int, samples: Mapping[str, Sequence[RolloutRow]]) -> None:
        """Too much for a console."""

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, line: str) -> None:
        if self._progress is None:
            print(line, file=self._console.file, flush=True)
        else:  # above the line that is redrawn
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        assert self._began is not None, "a row was written"
        first, then = self._began
        if step == first:
            return ""
        seconds = (time.monotonic() - then) / (step - first) * (self._total - step)
        return f"{duration(seconds)} left"


def _status(metrics: Mapping[str, float]) -> list[str]:
    parts = [f"reward {metrics['reward/mean']:.3f}"]
    if (rate := metrics.get("throughput/tokens_per_second")) is not None:
        parts.append(f"{rate:,.0f} tok/s")
    if (lag := metrics.get("off_policy/version_lag_mean")) is not None:
        parts.append(f"lag {lag:.1f}")
    if (step_seconds := metrics.get("time/step", 0.0)) > 0:
        parts.append(f"wait {metrics.get('time/wait_for_batch', 0.0) / step_seconds:.0%}")
        parts.append(f"{step_seconds:.2f} s/step")
    return parts


def _evaluations(step: int, metrics: Mapping[str, float]) -> list[str]:
    """A line for each set."""
    lines = []
    for name in sorted(metrics):
        if not name.startswith("eval/") or not name.endswith("/avg_at_k"):
            continue
        prefix = name.removesuffix("/avg_at_k")
        parts = [_estimate("avg@k", name, metrics)]
        passed = f"{prefix}/pass_at_k"
        if metrics.get(passed, metrics[name]) != metrics[name]:  # the same number with one sample a prompt
            parts.append(_estimate("pass@k", passed, metrics))
        if unscored := metrics.get(f"{prefix}/unscored_fraction"):
            parts.append(f"{unscored:.1%} without a score")
        lines.append(f"eval at step {step}: {prefix.removeprefix('eval/')} {' · '.join(parts)}")
    return lines


def _estimate(label: str, name: str, metrics: Mapping[str, float]) -> str:
    error = metrics.get(f"{name}_stderr", math.nan)
    return f"{label} {metrics[name]:.3f}" + (f" ± {error:.3f}" if math.isfinite(error) else "")
