"""What a person sees of a rollout: one live line on a terminal, a plain line now and then without one."""

import asyncio
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from olmorl.metrics.duration import duration
from olmorl.metrics.utilization import Peak, utilization

Stats = Mapping[str, Mapping[str, float]]  # worker name -> counters since it started

REDRAW_SECONDS = 1.0
LINE_SECONDS = 15.0  # between lines without a terminal


class RolloutProgress:
    def __init__(
        self,
        total: int | None,
        *,
        done: Callable[[], int],
        stats: Callable[[], Stats],
        peak: Peak,
        console: Console | None = None,
    ) -> None:
        """Counts samples; `total` is None while it is not known. `peak` is of one worker."""
        self._total = total
        self._done = done
        self._stats = stats
        self._peak = peak
        self._console = console or Console(stderr=True)
        self._first = done()
        self._started = time.monotonic()
        self._before: dict[str, dict[str, float]] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(LINE_SECONDS)
                line = f"{self._count()} · {self.status()}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.fields[count]}"), BarColumn(bar_width=16), TextColumn("{task.fields[status]}"))
        with Progress(*columns, console=self._console, refresh_per_second=2, transient=True) as progress:
            task = progress.add_task("", total=self._total, completed=self._first, count=self._count(), status="")
            while True:
                await asyncio.sleep(REDRAW_SECONDS)
                progress.update(task, completed=self._done(), count=self._count(), status=self.status())

    def _count(self) -> str:
        return f"{self._done():,}{'' if self._total is None else f'/{self._total:,}'} samples"

    def status(self) -> str:
        """Rates since the last call; shares are means over the workers."""
        now = {name: dict(counters) for name, counters in self._stats().items() if counters}
        before, self._before = self._before, now
        used = [utilization(before.get(name, {}), counters, peak=self._peak) for name, counters in now.items()]
        tokens = sum(c["output_tokens"] - before.get(name, {}).get("output_tokens", 0.0) for name, c in now.items())
        seconds = max((u.seconds for u in used), default=0.0)
        parts = [
            f"{tokens / seconds if seconds else 0.0:,.0f} tok/s",
            f"live batch {sum(counters['running'] for counters in now.values()):.0f}",
            f"MBU {sum(u.mbu for u in used) / max(len(used), 1):.1%}",
        ]
        done = self._done() - self._first
        if self._total is not None and done:
            left = (time.monotonic() - self._started) / done * (self._total - self._done())
            parts.append(f"{duration(left)} left")
        return " · ".join(parts)
