"""Where a step's metrics go. A sink takes what is given to it and never decides anything."""

from typing import Protocol


class MetricSink(Protocol):
    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One step's metrics. Steps may repeat (an evaluation between two steps) but never go back."""

    def close(self) -> None:
        """Flush and let go. Safe to call twice."""
