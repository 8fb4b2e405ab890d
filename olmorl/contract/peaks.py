"""What a device could do at most, and who says so: the denominators of MFU and MBU, and the planner's devices.

By the vendor for known GPUs, measured for anything else. Engine and learner ask the same function, so that a share of
the peak is a share of the same peak.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

_TERA = {  # a device's whole name without its maker: dense bfloat16 TFLOP/s, TB/s of memory, the data sheet
    "A100-SXM4-80GB": (312, 2.04, "NVIDIA A100"),
    "A100-SXM4-40GB": (312, 1.555, "NVIDIA A100"),
    "A100 80GB PCIe": (312, 1.935, "NVIDIA A100"),
    "A100-PCIE-40GB": (312, 1.555, "NVIDIA A100"),
    "H100 80GB HBM3": (990, 3.35, "NVIDIA H100 (SXM)"),
    "H100 PCIe": (756, 2.0, "NVIDIA H100 (PCIe)"),
    "H100 NVL": (835, 3.9, "NVIDIA H100 (NVL)"),
    "H200": (990, 4.8, "NVIDIA H200 (SXM)"),
    "H200 NVL": (835, 4.8, "NVIDIA H200 (NVL)"),
    "GH200 480GB": (990, 4.0, "NVIDIA GH200 (96 GB of HBM3)"),
    "GH200 144G HBM3e": (990, 4.9, "NVIDIA GH200 (144 GB of HBM3e)"),
    "B200": (2250, 8.0, "NVIDIA HGX B200"),
    "GB200": (2500, 8.0, "NVIDIA GB200 NVL72"),
    "L4": (121, 0.3, "NVIDIA L4"),
    "L40": (181, 0.864, "NVIDIA L40"),
    "L40S": (362, 0.864, "NVIDIA L40S"),
    "A10": (125, 0.6, "NVIDIA A10"),
    "A30": (165, 0.933, "NVIDIA A30"),
    "A40": (150, 0.696, "NVIDIA A40"),
    "Instinct MI300X": (1307, 5.3, "AMD Instinct MI300X"),
    "Instinct MI325X": (1307, 6.0, "AMD Instinct MI325X"),
}
_MAKER = re.compile("(NVIDIA|AMD) ")
SECONDS = 0.2  # for each of what is timed

Product = Callable[[Any], Callable[[], object]]
"""from a square matrix to a call that multiplies it with itself"""


@dataclass(frozen=True, slots=True)
class Probe:
    """What is timed where nobody says what a device can do."""

    matrix: int  # rows of the product
    stream: int  # numbers that are read in one go: beyond the caches
    dtype: str
    element_size: int  # bytes


CPU_PROBE = Probe(1024, 1 << 25, "float32", 4)
GPU_PROBE = Probe(4096, 1 << 28, "bfloat16", 2)


@dataclass(frozen=True, slots=True)
class DevicePeak:
    flops: float  # FLOP/s
    bandwidth: float  # bytes/s, of reading
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.4g} TFLOP/s and {self.bandwidth / 1e9:.4g} GB/s ({self.source})"


def vendor_peak(name: str) -> DevicePeak | None:
    """Of a GPU by its whole name, as its driver has it; None where the vendor's figures are not known. A part of a name
    tells nothing: a GH200 is no H200, a slice of an H100 no H100."""
    if (known := _TERA.get(_MAKER.sub("", name, count=1))) is None:
        return None
    tera_flops, tera_bytes, sheet = known
    return DevicePeak(tera_flops * 1e12, tera_bytes * 1e12, f"vendor figures, data sheet of {sheet}")


def gpu_peak(name: str, ones: Callable[..., Any], *, synchronize: Callable[[], object]) -> DevicePeak:
    """Its vendor's figures; those of an unknown GPU are measured, which the source says. `ones(shape)` makes a bfloat16
    array on the device."""
    if (known := vendor_peak(name)) is not None:
        return known
    measured = measured_peak(ones, probe=GPU_PROBE, synchronize=synchronize)
    return replace(measured, source=f"{measured.source}: no vendor figures are known here for {name!r}")


def measured_peak(
    ones: Callable[..., Any],
    *,
    threads: int | None = None,
    products: Sequence[Product] = (),
    synchronize: Callable[[], object] = lambda: None,
    probe: Probe = CPU_PROBE,
) -> DevicePeak:
    """Under a second on a CPU. `ones(shape)` makes an array on the device, of the probe's dtype. `products` are further
    ways to multiply; the fastest counts. `threads` are told in the source."""
    square = ones((probe.matrix, probe.matrix))
    works = [lambda: square @ square, *(product(square) for product in products)]
    product_seconds = min(best_seconds(work, synchronize) for work in works)
    read_seconds = best_seconds(ones((probe.stream,)).sum, synchronize)
    by = f", {threads} threads" if threads else ""
    source = f"measured {probe.dtype} product and streaming read{by}"
    return DevicePeak(2 * probe.matrix**3 / product_seconds, probe.element_size * probe.stream / read_seconds, source)


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
