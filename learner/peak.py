"""What one device could do at most, and who says so: the vendor for known GPUs, a measurement for anything else."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from olmorl.contract.peaks import VENDOR_PEAKS

MATRIX = 1024  # of the product that is timed on a CPU
STREAM_BYTES = 128 << 20  # read in one go; well beyond the caches
REPEATS = 3


@dataclass(frozen=True, slots=True)
class DevicePeak:
    flops: float  # FLOP/s
    bandwidth: float  # bytes/s, of reading
    source: str


def device_peak(device: torch.device) -> DevicePeak:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (flops, bandwidth) in VENDOR_PEAKS.items():
            if known in name:
                return DevicePeak(flops, bandwidth, f"vendor figure for {known}")
    matrix = torch.ones(MATRIX, MATRIX, device=device)
    stream = torch.ones(STREAM_BYTES // 4, device=device)
    return DevicePeak(
        2 * MATRIX**3 / _seconds(lambda: matrix @ matrix, device),
        STREAM_BYTES / _seconds(stream.sum, device),
        f"measured float32 product and read, {torch.get_num_threads()} threads",
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The fastest of a few runs: others share the machine, and they only ever slow us."""
    work()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
