"""What a device could do at most, and who says so: the denominators of MFU and MBU, and the planner's devices.

By the vendor for known GPUs, measured for anything else. Engine and learner ask the same function, so that a share of
the peak is a share of the same peak.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VENDOR_PEAKS = {  # part of the device's name: dense bfloat16 FLOP/s, bytes/s of memory
    "A100": (312e12, 2.04e12),
    "H100": (990e12, 3.35e12),
    "H200": (990e12, 4.8e12),
    "B200": (2250e12, 8.0e12),
}
MATRIX = 1024  # rows of the product that is timed
STREAM = 1 << 25  # floats that are read in one go: beyond the caches
SECONDS = 0.2  # for each of what is timed

Product = Callable[[Any], Callable[[], object]]
"""from a square matrix of float32 to a call that multiplies it with itself"""


@dataclass(frozen=True, slots=True)
class DevicePeak:
    flops: float  # FLOP/s
    bandwidth: float  # bytes/s, of reading
    source: str


def vendor_peak(name: str) -> DevicePeak | None:
    """Of a GPU by its name, where the vendor's figures are known."""
    for known, (flops, bandwidth) in VENDOR_PEAKS.items():
        if known in name:
            return DevicePeak(flops, bandwidth, f"vendor figures for {known}")
    return None


def measured_peak(
    ones: Callable[..., Any],
    *,
    threads: int | None = None,
    products: Sequence[Product] = (),
    synchronize: Callable[[], object] = lambda: None,
) -> DevicePeak:
    """Under a second on a CPU. `ones(shape)` makes a float32 array on the device. `products` are further ways to
    multiply; the fastest counts. `threads` are told in the source."""
    matrix = ones((MATRIX, MATRIX))
    works = [lambda: matrix @ matrix, *(product(matrix) for product in products)]
    product_seconds = min(best_seconds(work, synchronize) for work in works)
    stream = ones((STREAM,))
    read_seconds = best_seconds(stream.sum, synchronize)
    by = f", {threads} threads" if threads else ""
    source = f"measured float32 product and streaming read{by}"
    return DevicePeak(2 * MATRIX**3 / product_seconds, 4 * STREAM / read_seconds, source)


def best_seconds(work: Callable[[], object], synchronize: Callable[[], object] = lambda: None) -> float:
    """The fastest of as many runs as fit `SECONDS`, at least one: others' load can only slow a run down."""
    work()
    synchronize()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end or best == float("inf"):
        started = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - started)
    return best
