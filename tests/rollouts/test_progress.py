"""What a person sees: rates between two looks, means over workers, and no time left where none can be known."""

import asyncio
import io
import re

import pytest
from rich.console import Console

from olmorl.metrics.utilization import Peak
from olmorl.rollouts import progress
from olmorl.rollouts.progress import RolloutProgress

PEAK = Peak(flops=1e9, bandwidth=1000.0)


def counters(tokens: float, num_bytes: float, seconds: float, running: float = 8.0) -> dict[str, float]:
    return {"output_tokens": tokens, "bytes": num_bytes, "flops": 0.0, "wall_seconds": seconds, "running": running}


def test_rates_are_of_the_time_between_two_looks() -> None:
    stats = {"a": counters(100, 5000, 10), "b": counters(100, 5000, 10), "new": {}}
    done = [0]
    shown = RolloutProgress(40, done=lambda: done[0], stats=lambda: stats, peak=PEAK)
    assert shown.status() == "20 tok/s · live batch 16 · MBU 50.0%"
    stats["a"], stats["b"] = counters(500, 6000, 12, 5), counters(300, 8000, 12, 5)
    done[0] = 10
    status = shown.status()
    assert status.startswith("300 tok/s · live batch 10 · MBU 100.0% · ") and re.search(r"\d:\d\d left$", status)


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_with_and_without_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.001)
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.001)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    shown = RolloutProgress(None, done=lambda: 1234, stats=dict, peak=PEAK, console=console)

    async def main() -> None:
        running = asyncio.create_task(shown.run())
        async with asyncio.timeout(60):
            while "MBU" not in out.getvalue():
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert "1,234 samples" in out.getvalue() and "left" not in out.getvalue()
