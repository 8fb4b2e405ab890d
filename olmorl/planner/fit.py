"""Costs from what was measured: the JSON of `olmorl bench engine`, of `olmorl bench learner`, and the rows of a run."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from olmorl.contract.errors import ConfigError
from olmorl.metrics.run_figures import RunFigures
from olmorl.planner.costs import Device, EngineCost, LearnerCost, StepCurve, SyncCost
from olmorl.planner.shape import ModelShape

KNOT_RATIO = 1.1  # between the token counts of a curve: each is far enough from the last to be told from it
REWEIGHTED = 20  # times; by then a step that took ten times as long has no weight to speak of
MEMORY = 16e9  # bytes of a measured device, where nobody says how many


def fitted_engine(cost: EngineCost, bench: Mapping[str, Any]) -> EngineCost:
    """`cost` with the step curve of `olmorl bench engine`, for the model and the device that it measured.

    Raises:
        ConfigError: the JSON is of something else, of another model, or of a benchmark too short to tell anything.
    """
    device = measured_device(bench, cost.device)
    _check_same(bench, cost.shape)
    curve = replace(step_curve(cost.shape, bench["profile"]), devices=_devices(bench))
    return replace(cost, device=device, measured=curve)


def measured_device(bench: Mapping[str, Any], like: Device | None = None) -> Device:
    """One of those that the engine of a benchmark had. Raises ConfigError: it is no benchmark of an engine."""
    _check(bench, ("peak_tflops", "peak_gbs"), "olmorl bench engine", also=("profile",))
    flops, bandwidth = (bench[peak] / _devices(bench) for peak in ("peak_tflops", "peak_gbs"))
    flops, bandwidth = flops * 1e12, bandwidth * 1e9
    if like is None:
        return Device(name="measured", flops=flops, bandwidth=bandwidth, memory=MEMORY)
    return replace(like, name=f"measured {like.name}", flops=flops, bandwidth=bandwidth)


def _devices(bench: Mapping[str, Any]) -> int:
    return int(bench.get("tensor_parallel_size", 1))


def step_curve(shape: ModelShape, profile: list[list[float]]) -> StepCurve:
    """Over steps of [tokens computed, FLOPs, seconds, rows of logits]: medians, which a busy moment of the machine does
    not move. Without the last, as files of old have it, the head was counted for every token."""
    try:
        steps_NC = np.array(profile, np.float64)
    except (TypeError, ValueError):
        steps_NC = np.empty(0)
    if (
        steps_NC.ndim != 2
        or steps_NC.shape[1] not in (3, 4)
        or not np.isfinite(steps_NC).all()
        or not steps_NC[:, 2].any()
    ):
        raise ConfigError("the benchmark's profile must be a list of steps: [tokens, FLOPs, seconds, rows of logits]")
    if len(steps_NC) < 8:
        raise ConfigError(f"the benchmark made {len(steps_NC)} steps; at least 8 tell what a step costs")
    tokens_N, flops_N, seconds_N = steps_NC[:, :3].T
    drawn_N = steps_NC[:, -1] if steps_NC.shape[1] == 4 else tokens_N
    weights_N = np.array([shape.flops(step, 0, drawn=drawn) for step, drawn in zip(tokens_N, drawn_N, strict=True)])
    keys_N = np.maximum(flops_N - weights_N, 0.0) / shape.flops(0, 1)
    knots = _knots(np.unique(tokens_N))
    hats_NK = np.stack([np.interp(tokens_N, knots, np.eye(len(knots))[k]) for k in range(len(knots))], axis=1)
    largest = max(keys_N.max(), 1.0)
    of_keys = _least_absolute(np.column_stack([hats_NK, keys_N / largest]), seconds_N)[-1] / largest
    a_pair = max(0.0, float(of_keys))  # below zero where attention is too cheap to be seen
    own_N = seconds_N - a_pair * keys_N
    near_N = np.abs(tokens_N[:, None] - knots).argmin(axis=1)
    points = _rising([np.stack([tokens_N, own_N])[:, near_N == k] for k in range(len(knots))])
    return StepCurve(
        tokens=tuple(tokens for tokens, _ in points),
        at_tokens=tuple(max(0.0, seconds) for _, seconds in points),
        a_pair=a_pair,
    )


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
    """From a run of as many engines, in which hardly a request was under way when an update came, or none was waited
    for; `bandwidth` is that of an engine's memory."""
    return SyncCost(
        shape=shape,
        bandwidth=math.inf,
        memory_bandwidth=bandwidth,
        latency=figures.update_seconds,
        snapshot=figures.snapshot_seconds,
        swap=0.0,
    )


def _check(bench: Mapping[str, Any], names: tuple[str, ...], command: str, *, also: tuple[str, ...] = ()) -> None:
    """All `names` are numbers above 0, and those of `also` are there."""
    missing = [name for name in (*also, *names) if name not in bench]
    if missing:
        raise ConfigError(f"the benchmark lacks {', '.join(missing)}; make it with {command} --json")
    for name in names:
        if type(bench[name]) not in (int, float) or not 0 < bench[name] < math.inf:
            raise ConfigError(f"{name} of the benchmark is {bench[name]!r}; make it with {command} --json")


def _check_same(bench: Mapping[str, Any], shape: ModelShape) -> None:
    """A step of another model, or of other weights, costs something else. What an older file does not say is taken on
    trust."""
    measured = bench.get("active_parameters", shape.active_parameters)
    if abs(measured / shape.active_parameters - 1) > 0.01:
        raise ConfigError(
            f"the benchmark is of a model with {measured:,} parameters, {shape.name} has {shape.active_parameters:,}; "
            "measure the model that is planned"
        )
    held = bench.get("quantization", shape.quantization)
    if held != shape.quantization:
        raise ConfigError(
            f"the benchmark measured weights in {held or 'the format of the model'}, the engines of this run hold "
            f"{shape.quantization or 'them as they are'}; measure with the --quantization of inference.quantization"
        )


def _knots(distinct: np.ndarray) -> np.ndarray:
    kept = [distinct[0]]
    for value in distinct[1:]:
        if value >= kept[-1] * KNOT_RATIO:
            kept.append(value)
    return np.array(kept)


def _least_absolute(columns_NK: np.ndarray, wanted_N: np.ndarray) -> np.ndarray:
    """[K] with the least sum of absolute errors, by least squares weighted again and again."""
    weights_N = np.ones_like(wanted_N)
    for _ in range(REWEIGHTED):
        solved_K = np.linalg.lstsq(columns_NK * weights_N[:, None], wanted_N * weights_N, rcond=None)[0]
        errors_N = np.abs(wanted_N - columns_NK @ solved_K)
        weights_N = np.maximum(errors_N, 1e-3 * wanted_N.mean()) ** -0.5
    return np.asarray(solved_K)


def _rising(groups: list[np.ndarray]) -> list[tuple[float, float]]:
    """(median tokens, median seconds) of each group [2, n] of steps; of neighbours together where seconds would fall.
    So the curve is the nearest that does not (pool adjacent violators, each step with the same weight)."""
    pools: list[list[np.ndarray]] = []
    for group_2N in groups:
        pools.append([group_2N])
        while len(pools) > 1 and _median(pools[-2], 1) > _median(pools[-1], 1):
            pools[-2:] = [pools[-2] + pools[-1]]
    points = [(_median([group_2N], 0), _median(pool, 1)) for pool in pools[:-1] for group_2N in pool]
    return [*points, (_median(pools[-1], 0), _median(pools[-1], 1))]  # one point, for what comes behind has its slope


def _median(pool: list[np.ndarray], row: int) -> float:
    return float(np.median(np.concatenate(pool, axis=1)[row]))
