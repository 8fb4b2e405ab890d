"""Seconds of what engines, learners and the network do: a roofline with the factors by which real machines miss it.

Factors are stated, fitted from a benchmark (`fitted_engine`), or the defaults below; each plan prints those it used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from olmorl.contract.errors import ConfigError
from olmorl.contract.peaks import VENDOR_PEAKS
from olmorl.planner.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: str
    flops: float  # FLOP/s, dense, of the model's dtype
    bandwidth: float  # bytes/s of memory
    memory: float  # bytes
    dollars_per_hour: float = 0.0


_MEMORY_AND_PRICE = {"A100": (80e9, 1.5), "H100": (80e9, 2.5), "H200": (141e9, 3.2), "B200": (180e9, 5.0)}
"""Bytes, and dollars an hour: round numbers for comparisons, to be replaced by one's own."""

DEVICES = {
    name.lower(): Device(
        name=name.lower(), flops=flops, bandwidth=bandwidth, memory=memory, dollars_per_hour=dollars_per_hour
    )
    for name, (flops, bandwidth) in VENDOR_PEAKS.items()
    for memory, dollars_per_hour in [_MEMORY_AND_PRICE[name]]
}


def device(name: str) -> Device:
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise ConfigError(f"device {name!r} is not known; there are {', '.join(DEVICES)}") from None


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

    def step_seconds(self, *, tokens: int, sequences: int, pairs: float, reads: float) -> float:
        """`tokens` computed, which attend to `pairs` keys all together; `reads` keys are read for that, each
        sequence's once."""
        compute = self.shape.flops(tokens, pairs) / (self.device.flops * self.compute_efficiency)
        memory = self.shape.step_bytes(reads) / (self.device.bandwidth * self.bandwidth_efficiency)
        reduce = 2 * self.shape.num_layers * self.reduce_latency if self.tensor_parallel > 1 else 0.0
        busy = max(compute, memory) / self.tensor_parallel
        return busy + reduce + self.step_overhead + sequences * self.sequence_overhead

    def kv_tokens(self, *, memory_share: float = 0.9) -> int:
        """Tokens whose keys and values fit beside the weights."""
        free = self.device.memory * self.tensor_parallel * memory_share - self.shape.weight_bytes
        return max(0, int(free / self.shape.kv_bytes_per_token))


LEARNER_EFFICIENCY = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCost:
    """Of `ranks` devices that train together: three forward passes' worth of FLOPs a token."""

    shape: ModelShape
    device: Device
    ranks: int
    efficiency: float = LEARNER_EFFICIENCY
    recompute: float = 4 / 3
    """activation checkpointing computes the forward pass once more"""
    step_overhead: float = 2.0

    def train_seconds(self, lengths: list[int]) -> float:
        """One optimizer step over sequences of so many tokens, prompts included; attention is causal."""
        flops = sum(3 * self.shape.flops(n, sum_seen(self.shape, n)) for n in lengths)
        return self.step_overhead + self.recompute * flops / (self.device.flops * self.ranks * self.efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    shape: ModelShape
    bandwidth: float = 25e9  # bytes/s from the learner to all engines at once
    latency: float = 0.5
    snapshot: float = 1.0
    """seconds for which the learner hands its weights over"""
    swap: float = 0.05
    """seconds for which an engine stands still to take staged weights"""

    @property
    def transfer_seconds(self) -> float:
        return self.latency + self.shape.weight_bytes / self.bandwidth


def sum_seen(shape: ModelShape, length: int) -> float:
    """Keys that the tokens of one sequence see all together, averaged over the layers."""
    whole = length * (length + 1) / 2
    if shape.window is None or length <= shape.window:
        return whole
    window = shape.window
    slid = window * (window + 1) / 2 + (length - window) * window
    return shape.full_share * whole + (1 - shape.full_share) * slid


def fitted_engine(cost: EngineCost, bench: Mapping[str, Any]) -> EngineCost:
    """`cost` with its efficiencies from the JSON of `olmorl bench engine` on this machine.

    A decoding step's excess over the roofline is taken as efficiency, not as overhead: one benchmark cannot tell them
    apart, and at the batch it was made with they are the same.
    """
    for name in ("decode_mfu", "decode_mbu", "prefill_mfu", "peak_tflops", "peak_gbs"):
        if name not in bench:
            raise ConfigError(f"the benchmark lacks {name!r}; make it with olmorl bench engine --json")
    measured = replace(
        cost.device, name="measured", flops=bench["peak_tflops"] * 1e12, bandwidth=bench["peak_gbs"] * 1e9
    )
    return replace(
        cost,
        device=measured,
        compute_efficiency=bench["decode_mfu"],
        bandwidth_efficiency=max(bench["decode_mbu"], 1e-9) if bench["decode_mbu"] > bench["decode_mfu"] else 1.0,
        step_overhead=0.0,
        sequence_overhead=0.0,
    )
