"""How much of the hardware's peak was used: MFU and MBU from counters.

Workers count what they really did (FLOPs and bytes of each step, by the formulas of docs/numerics.md); a rate is the
difference of two snapshots of those counters, so no rate is ever averaged over unequal spans.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What the devices of one worker could do at most, all together."""

    flops: float  # FLOP/s
    bandwidth: float  # bytes/s
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """Fractions of 1 over one span of time."""

    mfu: float
    mbu: float
    seconds: float


def since(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    """How much counter `name` grew. A counter that fell was restarted with its worker, and began again at zero."""
    old, new = before.get(name, 0.0), after.get(name, 0.0)
    return new - old if new >= old else new


def utilization(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    peak: Peak,
    seconds: str = "wall_seconds",
    flops: str = "flops",
    num_bytes: str = "bytes",
) -> Utilization:
    """Between two snapshots of one worker's counters; the last three name the counters. No time passed: all zero."""
    span = since(before, after, seconds)
    if span <= 0:
        return Utilization(mfu=0.0, mbu=0.0, seconds=0.0)
    return Utilization(
        mfu=since(before, after, flops) / (span * peak.flops),
        mbu=since(before, after, num_bytes) / (span * peak.bandwidth),
        seconds=span,
    )


_PUBLISHED_BYTES_PER_TOKEN = 3.926e9
_PUBLISHED_FLOPS_PER_TOKEN = 27.05e9
_PUBLISHED_PEAK = Peak(flops=990e12, bandwidth=3.35e12)


def as_reported(tokens_per_second: float, *, devices: int) -> dict[str, float]:
    """MFU and MBU as OLMo 3's ablation states them, for a comparison of like with like only.

    There both are tokens/s times a constant (Qwen2.5-7B at 34,048 tokens in a batch of 16) over the peaks of an H100,
    whatever model and device ran; derived from the four rows of the published table, which it reproduces to 0.02
    percentage points.
    """
    a_device = tokens_per_second / devices
    return {
        "mfu_as_reported": a_device * _PUBLISHED_FLOPS_PER_TOKEN / _PUBLISHED_PEAK.flops,
        "mbu_as_reported": a_device * _PUBLISHED_BYTES_PER_TOKEN / _PUBLISHED_PEAK.bandwidth,
    }
