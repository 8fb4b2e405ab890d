"""Where a step's metrics go. A sink takes what is given to it and never decides anything."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from olmorl.metrics.rollout_log import RolloutRow


class MetricSink(Protocol):
    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One step's metrics. In an attempt steps only grow; a resumed one may begin with some that an earlier one
        wrote."""

    def write_samples(self, version: int, samples: Mapping[str, Sequence[RolloutRow]]) -> None:
        """What the policy of that version answered in an evaluation, by set. Comes before the metrics of its step."""

    def close(self) -> None:
        """Flush and let go. Safe to call twice."""
