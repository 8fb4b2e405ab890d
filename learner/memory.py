"""The most memory that was held since a moment: of the device, or of the process on a CPU."""

import contextlib
import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # what the kernel takes as "the peak begins anew"


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
