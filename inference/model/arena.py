"""Memory for weights that asks for large pages where tensors live on a CPU.

A decode step reads every weight once. With small pages the processor spends a third of that time on finding out where
they are; numpy asks the system for large ones, torch does not.
"""

import math

import numpy as np
import torch

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Uninitialised tensors side by side, as long as the arena's dtype and device suit them."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def tensor(self, *shape: int) -> torch.Tensor:
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        size = math.prod(shape) * self._dtype.itemsize
        if self._used + size > len(self._chunk):
            memory = np.empty(max(size, _CHUNK_BYTES) + _ALIGNMENT, np.uint8)
            skip = -memory.ctypes.data % _ALIGNMENT
            self._chunk, self._used = torch.from_numpy(memory[skip:]), 0
        part = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part.view(self._dtype).view(shape)
