"""What memory a process holds, and the most that it held since a moment: of the device, or of the process on a CPU."""

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # what the kernel takes as "the peak begins anew"
_MMAP_THRESHOLD = -3  # of mallopt
_LARGE_BYTES = 4 << 20


def return_freed_blocks() -> None:
    """Large blocks go back to the system when they are freed.

    The C library of Linux keeps those of up to 32 MB for requests to come. A step has blocks of many sizes, and what
    lies unused between them comes to half of what is used. Every block is then new memory, and a step takes a third
    longer.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def reset_peak(device: torch.device) -> None:
    """Where the kernel offers no way, or denies it, the peak of a process counts from its start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
