"""Costs taken from benchmarks: what went in comes out, and what is no benchmark is told."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmorl.contract.errors import ConfigError
from olmorl.planner.costs import Device, EngineCost
from olmorl.planner.fit import fitted_engine, fitted_learner, step_curve
from olmorl.planner.shape import ModelShape

SHAPE = ModelShape(
    name="small", num_layers=4, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=512, tied=True,
)  # fmt: skip
COST = EngineCost(shape=SHAPE, device=Device(name="any", flops=1e12, bandwidth=1e11, memory=1e9))


def truth(tokens: int, pairs: float) -> float:
    """A step of a CPU: a floor of memory up to 8 tokens, a slope of compute beyond, attention."""
    return 0.010 + 0.0004 * max(0, tokens - 8) + 2e-7 * pairs


def profile(steps: int = 600, *, noise: float = 0.0) -> list[list[float]]:
    rng = random.Random(0)
    made = []
    for _ in range(steps):
        tokens = rng.randint(1, 24)
        pairs, rows = tokens * rng.uniform(20, 2000), rng.randint(0, tokens)
        seconds = truth(tokens, pairs) * (1 + noise * rng.gauss(0, 1))
        made.append([tokens, SHAPE.flops(tokens, pairs, drawn=rows), seconds, rows])
    return made


def test_a_curve_is_what_was_measured() -> None:
    curve = step_curve(SHAPE, profile(noise=0.05))
    for tokens, pairs in ((1, 400.0), (6, 900.0), (12, 9000.0), (24, 100.0)):
        assert curve.seconds(tokens, pairs) == pytest.approx(truth(tokens, pairs), rel=0.05), tokens


def test_a_benchmark_of_old_counted_the_head_for_every_token() -> None:
    made = [[tokens, SHAPE.flops(tokens, 0) + flops - SHAPE.flops(tokens, 0, drawn=rows), seconds]
            for tokens, flops, seconds, rows in profile()]  # fmt: skip
    assert step_curve(SHAPE, made).seconds(16, 1000.0) == pytest.approx(truth(16, 1000.0), rel=0.02)


def test_a_hiccup_of_the_machine_is_no_cost() -> None:
    made = profile()
    made[7][2] = made[99][2] = 3.0
    assert step_curve(SHAPE, made).seconds(16, 1000.0) == pytest.approx(truth(16, 1000.0), rel=0.02)


@given(
    noise=st.floats(0, 0.08), outliers=st.floats(0, 0.25), slower=st.floats(1.2, 20), busy=st.integers(1, 20),
    seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_busy_moment_of_the_machine_is_no_cost(
    noise: float, outliers: float, slower: float, busy: int, seed: int
) -> None:
    """Some steps of every size were slower, and all of the few of one size: the others say that it cannot be so."""
    rng, made = random.Random(seed), []
    for tokens in range(1, 25):
        for _ in range(10 if tokens == busy else 60):
            pairs = tokens * rng.uniform(20, 2000)
            slow = tokens == busy or rng.random() < outliers
            seconds = truth(tokens, pairs) * (1 + noise * rng.gauss(0, 1)) * (slower if slow else 1.0)
            made.append([tokens, SHAPE.flops(tokens, pairs), seconds])
    curve = step_curve(SHAPE, made)
    for tokens in range(1, 25):
        assert curve.seconds(tokens, tokens * 900.0) == pytest.approx(truth(tokens, tokens * 900.0), rel=0.15), tokens
    assert list(curve.at_tokens) == sorted(curve.at_tokens) and list(curve.tokens) == sorted(set(curve.tokens))


def test_a_step_that_prefills_more_than_was_seen_goes_on_with_the_last_slope() -> None:
    curve = step_curve(SHAPE, profile())
    assert curve.seconds(400, 0.0) == pytest.approx(truth(400, 0.0), rel=0.05)


def test_an_engine_takes_what_was_measured() -> None:
    bench = {"profile": profile(), "peak_tflops": 0.1, "peak_gbs": 20.0}
    cost = fitted_engine(COST, bench)
    assert cost.step_seconds(tokens=8, sequences=8, pairs=500, reads=500) == pytest.approx(truth(8, 500), rel=0.02)
    assert (cost.device.flops, cost.device.bandwidth) == (0.1e12, 20e9)


def test_an_engine_of_several_devices_is_taken_for_what_it_is() -> None:
    bench = {"profile": profile(), "peak_tflops": 0.2, "peak_gbs": 40.0, "tensor_parallel_size": 2}
    cost, step = fitted_engine(COST, bench), {"tokens": 8, "sequences": 8, "pairs": 500.0, "reads": 500.0}
    assert (cost.device.flops, cost.device.bandwidth) == (0.1e12, 20e9)
    alike = replace(cost, tensor_parallel=2).step_seconds(**step)
    assert alike == pytest.approx(truth(8, 500), rel=0.02) and cost.step_seconds(**step) == 2 * alike
    reduced = 2 * SHAPE.num_layers * cost.reduce_latency
    assert replace(cost, tensor_parallel=4).step_seconds(**step) == pytest.approx(alike / 2 + reduced)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"profile": None}, "lacks profile"),
        ({"profile": profile(3)}, "made 3 steps; at least 8"),
        ({"profile": [[1.0, 2.0]] * 9}, "must be a list of steps"),
        ({"profile": [[1.0, None, 2.0]] * 9}, "must be a list of steps"),
        ({"profile": ["step"] * 9}, "must be a list of steps"),
        ({"profile": 9}, "must be a list of steps"),
        ({"profile": []}, "must be a list of steps"),
        ({"profile": [[1, 2e6, 0.0]] * 9}, "must be a list of steps"),
        ({"peak_gbs": "fast"}, "peak_gbs of the benchmark is 'fast'"),
        ({"peak_tflops": math.inf}, "peak_tflops of the benchmark is inf"),
        ({"active_parameters": 2 * SHAPE.active_parameters}, "small has 180,224; measure the model that is planned"),
        ({"quantization": "int8"}, "measured weights in int8, the engines of this run hold them as they are"),
    ],
)
def test_what_is_no_benchmark(change: dict[str, Any], told: str) -> None:
    bench = {"profile": profile(), "peak_tflops": 0.1, "peak_gbs": 20.0} | change
    with pytest.raises(ConfigError, match=told):
        fitted_engine(COST, {name: value for name, value in bench.items() if value is not None})


def test_a_learner_has_a_rate_and_what_a_step_costs_beside_it() -> None:
    bench = {"flops": 8e10, "seconds": 0.3 + 8e10 / 5e10, "short_flops": 2e10, "short_seconds": 0.3 + 2e10 / 5e10}
    cost = fitted_learner(SHAPE, bench | {"peak_tflops": 0.1})
    assert cost.step_overhead == pytest.approx(0.3) and cost.efficiency == pytest.approx(0.5)
    lengths = [[30, 50], [20]]
    shared, apart = cost.train_seconds(40, lengths), cost.train_seconds(40, [[30], [50], [20]])
    assert shared < apart, "a prompt is computed once for its group"
    one = 3 * SHAPE.flops(40 + 20, 60 * 61 / 2, drawn=20) / 5e10
    assert cost.train_seconds(40, [[20]]) == pytest.approx(0.3 + one)
    with pytest.raises(ConfigError, match="olmorl bench learner"):
        fitted_learner(SHAPE, {"seconds": 1.0})
