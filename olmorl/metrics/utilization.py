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
