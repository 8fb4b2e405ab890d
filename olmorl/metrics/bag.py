"""Collects a step's measurements and reduces each by the rule it was added with.

The rule is stated where the value is measured, because the reader of a dashboard cannot tell a mean of means from a
mean; one name under two rules is a bug and is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "max", "min", "std", "p95", "last"]

_REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mean": lambda values, weights: float(np.average(values, weights=weights)),
    "sum": lambda values, weights: float(values @ weights),
    "max": lambda values, weights: float(values.max()),
    "min": lambda values, weights: float(values.min()),
    "std": lambda values, weights: float(values.std()),
    "p95": lambda values, weights: float(np.percentile(values, 95)),
    "last": lambda values, weights: float(values[-1]),
}


@dataclass(slots=True)
class _Series:
    reduce: Reduction
    values: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class MetricBag:
    """Add while a step runs, drain once at its end.

    Example:
        bag.add("reward/mean", rewards, reduce="mean")
        bag.add("loss/policy", loss, reduce="mean", weight=num_tokens)
        bag.drain()  # {"reward/mean": 0.53, "loss/policy": 0.01}
    """

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def add(
        self,
        name: str,
        value: float | Sequence[float] | np.ndarray,
        *,
        reduce: Reduction = "mean",
        weight: float = 1.0,
    ) -> None:
        """One value, or many at once. `weight` counts for "mean" and "sum" alone. Nothing is added by an empty list."""
        assert reduce in _REDUCTIONS, f"{name}: no reduction {reduce!r}; there are {', '.join(_REDUCTIONS)}"
        assert weight >= 0, f"{name}: weight {weight} is negative"
        values = np.asarray(value, dtype=np.float64).ravel().tolist()
        if not values or weight == 0:
            return
        series = self._series.setdefault(name, _Series(reduce))
        assert series.reduce == reduce, f"{name} is reduced by {series.reduce!r} and by {reduce!r}"
        series.values += values
        series.weights += [weight] * len(values)

    def update(self, metrics: dict[str, float], *, reduce: Reduction = "last") -> None:
        """Add metrics that someone else has already reduced."""
        for name, value in metrics.items():
            self.add(name, value, reduce=reduce)

    def drain(self) -> dict[str, float]:
        """The reduced values, by name; the bag is empty afterwards. NaN stays NaN, so that it is seen."""
        series, self._series = self._series, {}
        return {name: _REDUCTIONS[s.reduce](np.asarray(s.values), np.asarray(s.weights)) for name, s in series.items()}
