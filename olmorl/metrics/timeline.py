"""timeline.jsonl: what each worker did, second by second, for the last minutes of a run.

A row is {"t": end, "span": seconds, "worker": name, "spent": {name: seconds}, ...gauges}; times are seconds since the
epoch. What was spent adds up to the span, and rows of a worker follow each other without a gap. The file is kept
short: what is older than its last few MB is dropped.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olmorl.metrics.jsonl_sink import drop_torn_line
from olmorl.metrics.time_ledger import engine_seconds
from olmorl.metrics.utilization import Peak, since

MAX_BYTES = 16 << 20
_GAUGES = ("running", "waiting", "kv_usage", "version")


class Timeline:
    """`peak`: of one inference worker, for its utilisation; `started`: when the run was, seconds since the epoch."""

    def __init__(self, path: Path, *, peak: Peak, started: float, max_bytes: int = MAX_BYTES) -> None:
        drop_torn_line(path)
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._peak = peak
        self._max_bytes = max_bytes
        self._engines: dict[str, tuple[float, dict[str, float]]] = {}
        self._started = started
        self._learner: tuple[float, dict[str, float]] = (started, {})

    def write(self, engines: Mapping[str, Mapping[str, float]], learner: Mapping[str, float], *, now: float) -> None:
        """`engines`: the newest counters of each; `learner`: its total seconds by name."""
        before_t, totals = self._learner
        joined = before_t if self._engines else self._started  # the first engines were starting since the run was
        for name, counters in engines.items():
            start, before = self._engines.setdefault(name, (joined, {}))
            if counters and counters.get("wall_seconds") != before.get("wall_seconds"):
                seen = counters.get("as_of", now)
                if not before:
                    start = min(start, seen - counters.get("wall_seconds", 0.0))
                row = self._engine_row(before, counters, seen - start)
                span = sum(row["spent"].values())  # by the engine's clock: this snapshot may have come late
                self._engines[name] = (start + span, dict(counters))
                self._write_row(start + span, span, name, row)
        self._learner = (now, dict(learner))
        spent = {kind: seconds - totals.get(kind, 0.0) for kind, seconds in learner.items()}
        self._write_row(now, now - before_t, "learner", {"spent": spent})
        self._file.flush()
        if self._file.tell() > self._max_bytes:
            self._drop_older_half()

    def close(self) -> None:
        self._file.close()

    def _engine_row(self, before: Mapping[str, float], after: Mapping[str, float], span: float) -> dict[str, Any]:
        lived = max(since(before, after, "wall_seconds"), 1e-9)
        return {
            "spent": engine_seconds(before, after, span=span),
            "tokens_per_second": since(before, after, "output_tokens") / lived,
            "mfu": since(before, after, "flops") / lived / self._peak.flops,
            "mbu": since(before, after, "bytes") / lived / self._peak.bandwidth,
            "updates": since(before, after, "updates"),
            **{name: after.get(name, 0.0) for name in _GAUGES},
        }

    def _write_row(self, t: float, span: float, worker: str, row: Mapping[str, Any]) -> None:
        rounded = {name: _rounded(value) for name, value in row.items()}
        self._file.write(json.dumps({"t": round(t, 3), "span": round(span, 3), "worker": worker, **rounded}) + "\n")

    def _drop_older_half(self) -> None:
        self._file.close()
        lines = self._path.read_bytes().splitlines(keepends=True)
        part = self._path.with_name(self._path.name + ".part")
        part.write_bytes(b"".join(lines[len(lines) // 2 :]))
        os.replace(part, self._path)
        self._file = self._path.open("a", encoding="utf-8")


def _rounded(value: Any) -> Any:
    return {k: round(v, 4) for k, v in value.items()} if isinstance(value, dict) else float(f"{value:.5g}")
