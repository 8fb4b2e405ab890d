"""Costs from what was measured: the JSON of `olmorl bench engine`, of `olmorl bench learner`, and the rows of a run."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from olmorl.contract.errors import ConfigError
from olmorl.metrics.run_figures import RunFigures
from olmorl.planner.costs import Device, EngineCost, LearnerCost, StepCurve, SyncCost
from olmorl.planner.shape import ModelShape

KNOT_RATIO = 1.2  # between the token counts of a curve: each is far enough from the last to be told from it
MEMORY = 16e9  # bytes of a measured device, where nobody says how many


def fitted_engine(cost: EngineCost, bench: Mapping[str, Any]) -> EngineCost:
    """`cost` with the step curve of `olmorl bench engine`, for the model and the device that it measured.

    Raises:
        ConfigError: the JSON is of something else, or of a benchmark too short to tell anything.
    """
    _check(bench, ("profile", "peak_tflops", "peak_gbs"), "olmorl bench engine")
    return replace(cost, device=measured_device(bench, cost.device), measured=step_curve(cost.shape, bench["profile"]))


def measured_device(bench: Mapping[str, Any], like: Device | None = None) -> Device:
    flops, bandwidth = bench["peak_tflops"] * 1e12, bench["peak_gbs"] * 1e9
    if like is None:
        return Device(name="measured", flops=flops, bandwidth=bandwidth, memory=MEMORY)
    return replace(like, name="measured", flops=flops, bandwidth=bandwidth)


def step_curve(shape: ModelShape, profile: list[list[float]]) -> StepCurve:
    """Least squares over steps of [tokens computed, FLOPs, seconds, rows of logits]. Without the last, as files of old
    have it, the head was counted for every token."""
    if len(profile) < 8:
        raise ConfigError(f"the benchmark made {len(profile)} steps; at least 8 tell what a step costs")
    tokens_N, flops_N, seconds_N = np.array([step[:3] for step in profile], np.float64).T
    weights_N = np.array([shape.flops(step[0], 0, drawn=step[3] if len(step) > 3 else None) for step in profile])
    keys_N = (flops_N - weights_N) / shape.flops(0, 1)
    usual_N = seconds_N <= _usual(tokens_N, seconds_N)
    tokens_N, keys_N, seconds_N = tokens_N[usual_N], np.maximum(keys_N[usual_N], 0.0), seconds_N[usual_N]
    knots = _knots(np.unique(tokens_N))
    hats_NK = np.stack([np.interp(tokens_N, knots, np.eye(len(knots))[k]) for k in range(len(knots))], axis=1)
    *at_knots, a_key = np.linalg.lstsq(np.column_stack([hats_NK, keys_N]), seconds_N, rcond=None)[0].tolist()
    if a_key < 0:  # attention is too cheap here to be seen
        at_knots, a_key = np.linalg.lstsq(hats_NK, seconds_N, rcond=None)[0].tolist(), 0.0
    rising = np.maximum.accumulate(np.maximum(at_knots, 0.0))
    return StepCurve(tokens=tuple(int(k) for k in knots), at_tokens=tuple(rising.tolist()), a_pair=a_key)


def fitted_learner(shape: ModelShape, bench: Mapping[str, Any]) -> LearnerCost:
    """Of one rank on the measured device, from `olmorl bench learner`: a rate, and what a step costs beside it."""
    _check(bench, ("flops", "seconds", "short_flops", "short_seconds", "peak_tflops"), "olmorl bench learner")
    flops, seconds = bench["flops"] - bench["short_flops"], bench["seconds"] - bench["short_seconds"]
    rate = bench["flops"] / bench["seconds"] if flops <= 0 or seconds <= 0 else flops / seconds
    peak = bench["peak_tflops"] * 1e12
    return LearnerCost(
        shape=shape,
        device=Device(name="measured", flops=peak, bandwidth=1.0, memory=MEMORY),
        ranks=1,
        efficiency=rate / peak,
        passes=3.0,
        step_overhead=max(0.0, bench["seconds"] - bench["flops"] / rate),
    )


def fitted_sync(shape: ModelShape, figures: RunFigures, *, bandwidth: float) -> SyncCost:
    """From a run in which hardly a request was under way when an update came, or none was waited for."""
    return SyncCost(
        shape=shape,
        bandwidth=math.inf,
        latency=figures.update_seconds,
        snapshot=figures.snapshot_seconds,
        swap=2 * shape.weight_bytes / bandwidth,  # read and written once
    )


def _check(bench: Mapping[str, Any], names: tuple[str, ...], command: str) -> None:
    missing = [name for name in names if name not in bench]
    if missing:
        raise ConfigError(f"the benchmark lacks {', '.join(missing)}; make it with {command} --json")


def _knots(distinct: np.ndarray) -> np.ndarray:
    kept = [distinct[0]]
    for value in distinct[1:]:
        if value >= kept[-1] * KNOT_RATIO:
            kept.append(value)
    if len(kept) > 1:  # the last slope reaches to the largest
        kept[-1] = distinct[-1]
    return np.array(kept)


def _usual(tokens_N: np.ndarray, seconds_N: np.ndarray) -> np.ndarray:
    """[N] the most that a step of so many tokens usually takes: three times the median of steps of that size."""
    limit_N = np.empty_like(seconds_N)
    edges = [*_knots(np.unique(tokens_N)), np.inf]
    for low, high in pairwise(edges):
        inside = (tokens_N >= low) & (tokens_N < high)
        limit_N[inside] = 3 * np.median(seconds_N[inside])
    return limit_N
