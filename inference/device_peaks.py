"""What the device could do at best: the denominators of MFU and MBU, and where the figures come from."""

import time
from collections.abc import Callable

import numpy as np
import torch

from olmorl.contract.peaks import VENDOR_PEAKS


def device_peaks(device: torch.device) -> tuple[float, float, str]:
    """(FLOP/s, bytes/s, source). Measured where no vendor's figure is known; takes under half a second on a CPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, (flops, bandwidth) in VENDOR_PEAKS.items():
            if part in name:
                return flops, bandwidth, f"vendor figures for {part}"
    matrix = torch.ones(768, 768, device=device)
    block = torch.ones(1 << 24, device=device)
    product_seconds = _best_seconds(lambda: matrix @ matrix, device, budget=0.15)
    if device.type == "cpu":
        product_seconds = min(product_seconds, _best_seconds(_compiled_product(matrix), device, budget=0.15))
    read_seconds = _best_seconds(block.sum, device, budget=0.2)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return (
        2 * matrix.shape[0] ** 3 / product_seconds,
        block.numel() * block.element_size() / read_seconds,
        f"measured float32 product and streaming read{threads}",
    )


def _compiled_product(matrix: torch.Tensor) -> Callable[[], None]:
    """The engine's own, which may be faster than the library's."""
    from inference.kernels import cpu_decoder
    from inference.kernels.cpu_team import Team, new_signals
    from inference.kernels.cpu_tile import LANES

    size, team = len(matrix), Team(torch.get_num_threads())
    panels = np.empty((size // LANES, size, LANES), np.float32)
    out = np.empty((size, size), np.float32)
    return lambda: team.run(
        cpu_decoder.head, new_signals(team.threads), matrix.numpy(), matrix.data_ptr(), size, panels, out
    )


def _best_seconds(work: Callable[[], object], device: torch.device, *, budget: float) -> float:
    """The fastest of as many runs as fit the budget: others' load can only slow a run down."""
    work()
    best, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end or best == float("inf"):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
