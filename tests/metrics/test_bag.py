"""Each reduction against its definition in plain Python."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.metrics.bag import MetricBag

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@given(VALUES)
def test_reductions(values: list[float]) -> None:
    bag = MetricBag()
    for reduce in ("mean", "sum", "max", "min", "std", "last"):
        for value in values:
            bag.add(reduce, value, reduce=reduce)
    close = {"rel": 1e-9, "abs": 1e-3}
    assert bag.drain() == {
        "mean": pytest.approx(statistics.fmean(values), **close),
        "sum": pytest.approx(math.fsum(values), **close),
        "max": max(values),
        "min": min(values),
        "std": pytest.approx(statistics.pstdev(values), **close),
        "last": values[-1],
    }
    assert bag.drain() == {}


@given(VALUES)
def test_many_at_once_equals_one_by_one(values: list[float]) -> None:
    one_by_one, at_once = MetricBag(), MetricBag()
    for value in values:
        one_by_one.add("m", value)
    at_once.add("m", np.asarray(values))
    assert one_by_one.drain() == at_once.drain()


def test_weights() -> None:
    bag = MetricBag()
    bag.add("mean", 1.0, weight=3)
    bag.add("mean", 5.0, weight=1)
    bag.add("mean", 1000.0, weight=0)
    bag.add("sum", 2.0, reduce="sum", weight=4)
    assert bag.drain() == {"mean": 2.0, "sum": 8.0}


def test_nothing_measured_is_no_metric() -> None:
    bag = MetricBag()
    bag.add("m", [])
    assert bag.drain() == {}


def test_nan_is_seen() -> None:
    bag = MetricBag()
    bag.add("m", [1.0, math.nan])
    assert math.isnan(bag.drain()["m"])


def test_p95() -> None:
    bag = MetricBag()
    bag.add("m", range(101), reduce="p95")
    assert bag.drain() == {"m": 95.0}


def test_one_name_has_one_rule() -> None:
    bag = MetricBag()
    bag.add("m", 1.0, reduce="sum")
    with pytest.raises(AssertionError, match="'sum' and by 'mean'"):
        bag.add("m", 1.0)


def test_update_takes_reduced_metrics() -> None:
    bag = MetricBag()
    bag.update({"a": 1.0})
    bag.update({"a": 2.0, "b": 3.0})
    assert bag.drain() == {"a": 2.0, "b": 3.0}
