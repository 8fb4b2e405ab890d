"""What a person sees while a run goes on: one live line on a terminal, a plain line now and then without one."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_LINES_WITHOUT_TERMINAL = 40  # in a whole run


class ConsoleSink:
    """`total_steps` sets the ETA; `first_step` is the last step already done when a run is resumed.

    On a terminal a line is redrawn in place at each step, and once a second so that the clock moves while a step
    takes long; what others print meanwhile scrolls above it.
    """

    def __init__(self, total_steps: int, *, first_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = total_steps
        self._first = first_step
        self._every = max(1, total_steps // _LINES_WITHOUT_TERMINAL)
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[status]}"),
                console=self._console,
                refresh_per_second=1,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, status="starting")
            self._progress.start()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for line in _evaluations(step, metrics):
            self._console.print(line, markup=False, highlight=False)
        if "reward/mean" not in metrics:
            return
        status = f"{_status(metrics)} · {self._eta(step)}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, status=status)
        elif step == self._first + 1 or step % self._every == 0 or step == self._total:
            self._console.print(f"step {step}/{self._total} · {status}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _eta(self, step: int) -> str:
        done = step - self._first
        seconds = (time.monotonic() - self._started) / max(done, 1) * (self._total - step)
        return f"{_duration(seconds)} left"


def _status(metrics: Mapping[str, float]) -> str:
    parts = [f"reward {metrics['reward/mean']:.3f}"]
    if (rate := metrics.get("throughput/tokens_per_second")) is not None:
        parts.append(f"{rate:,.0f} tok/s")
    if (lag := metrics.get("off_policy/version_lag_mean")) is not None:
        parts.append(f"lag {lag:.1f}")
    if (step_seconds := metrics.get("time/step", 0.0)) > 0:
        parts.append(f"wait {metrics.get('time/wait_for_batch', 0.0) / step_seconds:.0%}")
        parts.append(f"{step_seconds:.2f} s/step")
    return " · ".join(parts)


def _evaluations(step: int, metrics: Mapping[str, float]) -> list[str]:
    lines = []
    for name, value in sorted(metrics.items()):
        is_same_number = name.endswith("/pass_at_k") and value == metrics.get(
            f"{name.removesuffix('/pass_at_k')}/avg_at_k"
        )
        if name.startswith("eval/") and not is_same_number:  # which it is with one sample a prompt
            lines.append(f"eval at step {step}: {name.removeprefix('eval/')} {value:.3f}")
    return lines


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
