"""Seconds of what engines, learners and the network do: a roofline with the factors by which real machines miss it.

Factors are stated, or the defaults below; each plan prints those it used. `olmorl.planner.fit` has measured ones.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from olmorl.contract.errors import ConfigError
from olmorl.contract.peaks import vendor_peak
from olmorl.planner.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: str
    flops: float  # FLOP/s, dense, of the model's dtype
    bandwidth: float  # bytes/s of memory
    memory: float  # bytes
    dollars_per_hour: float = 0.0


def _known(short: str, name: str, *, memory: float, dollars_per_hour: float) -> Device:
    peak = vendor_peak(name)
    assert peak is not None, f"{name} is not in the table of vendors' figures"
    return Device(
        name=short, flops=peak.flops, bandwidth=peak.bandwidth, memory=memory, dollars_per_hour=dollars_per_hour
    )


DEVICES = {  # prices are round numbers for comparisons, to be replaced by one's own
    known.name: known
    for known in (
        _known("a100", "A100-SXM4-80GB", memory=80e9, dollars_per_hour=1.5),
        _known("h100", "H100 80GB HBM3", memory=80e9, dollars_per_hour=2.5),
        _known("h200", "H200", memory=141e9, dollars_per_hour=3.2),
        _known("b200", "B200", memory=180e9, dollars_per_hour=5.0),
    )
}


def device(name: str) -> Device:
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise ConfigError(f"device {name!r} is not known; there are {', '.join(DEVICES)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Seconds of an engine's step as they were measured: piecewise linear in the tokens it computes, and linear in the
    keys these attend to."""

    tokens: tuple[float, ...]
    """ascending"""
    at_tokens: tuple[float, ...]
    a_pair: float
    devices: int = 1
    """of the engine that was measured"""

    def seconds(self, tokens: int, pairs: float) -> float:
        """Beyond the last point the last slope goes on; below the first, the first value stays."""
        xs, ys = self.tokens, self.at_tokens
        i = min(max(bisect_left(xs, tokens), 1), len(xs) - 1) if len(xs) > 1 else 0
        if tokens <= xs[0] or i == 0:
            base = ys[0]
        else:
            base = ys[i - 1] + (ys[i] - ys[i - 1]) * (tokens - xs[i - 1]) / (xs[i] - xs[i - 1])
        return base + self.a_pair * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Of one inference worker of `tensor_parallel` devices."""

    shape: ModelShape
    device: Device
    tensor_parallel: int = 1
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.75
    step_overhead: float = 2e-3
    """seconds of host work and launches that a step cannot hide"""
    sequence_overhead: float = 10e-6
    """the same for each running sequence"""
    reduce_latency: float = 15e-6
    """seconds of one all-reduce between the devices of a worker; there are two a layer"""
    measured: StepCurve | None = None
    """takes the place of the roofline and of what it cannot hide"""
    slowdown: float = 1.0
    """multiplies every step"""

    def step_seconds(
        self, *, tokens: int, sequences: int, pairs: float, reads: float, drawn: int | None = None
    ) -> float:
        """`tokens` computed, which attend to `pairs` keys all together; `reads` keys are read for that, each
        sequence's once. Behind `drawn` of them a token is drawn; None: behind all."""
        reduce = 2 * self.shape.num_layers * self.reduce_latency if self.tensor_parallel > 1 else 0.0
        if self.measured is not None:
            share = self.measured.devices / self.tensor_parallel
            seconds = self.measured.seconds(tokens, pairs) * share
            return self.slowdown * (seconds if share == 1 else seconds + reduce)
        compute = self.shape.flops(tokens, pairs, drawn=drawn) / (self.device.flops * self.compute_efficiency)
        memory = self.shape.step_bytes(reads) / (self.device.bandwidth * self.bandwidth_efficiency)
        busy = max(compute, memory) / self.tensor_parallel
        return self.slowdown * (busy + reduce + self.step_overhead + sequences * self.sequence_overhead)

    def kv_tokens(self, slots: int, *, memory_share: float = 0.9) -> int:
        """Tokens that layers which see everything can hold, beside the weights and what sliding layers hold of so many
        sequences: their window at most, and no more than the others hold."""
        shape = self.shape
        free = self.kv_room(memory_share=memory_share)
        if shape.window is None or not shape.full_share:
            return int(free)
        return int(max(free, (free - slots * shape.window * (1 - shape.full_share)) / shape.full_share))

    def kv_room(self, *, memory_share: float = 0.9) -> float:
        """Tokens whose keys and values fit beside the weights, if every layer holds all of them."""
        free = self.device.memory * self.tensor_parallel * memory_share - self.shape.weight_bytes
        return max(0.0, free / self.shape.kv_bytes_per_token)


LEARNER_EFFICIENCY = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCost:
    """Of `ranks` devices that train together; a prompt is computed once for its group."""

    shape: ModelShape
    device: Device
    ranks: int
    efficiency: float = LEARNER_EFFICIENCY
    passes: float = 4.0
    """forward passes' worth of FLOPs: forward and backward are three, activation checkpointing is one more"""
    step_overhead: float = 2.0

    def train_seconds(self, prompt_tokens: int, groups: Sequence[Sequence[int]]) -> float:
        """One optimizer step over groups of responses of so many tokens; attention is causal."""
        shape, prompt = self.shape, prompt_tokens
        before = sum_seen(shape, prompt)
        flops = 0.0
        for lengths in groups:
            pairs = before + sum(sum_seen(shape, prompt + n) - before for n in lengths)
            flops += self.passes * shape.flops(prompt + sum(lengths), pairs, drawn=sum(lengths))
        return self.step_overhead + flops / (self.device.flops * self.ranks * self.efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """Of an update of all `engines`: their weights are gathered, sent and taken, and each costs by its bytes."""

    shape: ModelShape
    engines: int = 1
    transport: Literal["nccl", "ipc", "gloo"] = "nccl"
    bandwidth: float = 25e9
    """bytes/s of the link of a device, by which the learner's shards come together and leave for the engines"""
    memory_bandwidth: float = math.inf
    """bytes/s of an engine's memory"""
    latency: float = 0.1
    """seconds of what is said before and after sending"""
    snapshot: float = 0.1
    """the same of the gathering"""
    swap: float = 0.005
    """the same of taking staged weights"""

    @property
    def snapshot_seconds(self) -> float:
        """For which the learner hands its weights over."""
        return self.snapshot + self.shape.weight_bytes / self.bandwidth

    @property
    def transfer_seconds(self) -> float:
        """NCCL streams through all engines at once; gloo hands each bucket on as a whole, down a tree."""
        levels = self.engines.bit_length() if self.transport == "gloo" else 1
        return self.latency + levels * self.shape.weight_bytes / self.bandwidth

    @property
    def swap_seconds(self) -> float:
        """For which an engine stands still to take staged weights: they are read and written once."""
        return self.swap + 2 * self.shape.weight_bytes / self.memory_bandwidth


def sum_seen(shape: ModelShape, length: int) -> float:
    """Keys that the tokens of one sequence see all together, averaged over the layers."""
    whole = length * (length + 1) / 2
    if shape.window is None or length <= shape.window:
        return whole
    window = shape.window
    slid = window * (window + 1) / 2 + (length - window) * window
    return shape.full_share * whole + (1 - shape.full_share) * slid
