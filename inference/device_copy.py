"""Small arrays to a device and back without making either side wait: pinned memory, one copy each way.

On a CPU the same calls, and nothing is copied twice.
"""

from dataclasses import dataclass

import numpy as np
import torch

_ALIGNED = 16  # words: each array begins where Triton may assume 16 bytes


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Integers as int32, float32 as it is. torch keeps the pinned buffer until the copy has read it."""
    sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
    host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    packed = host.numpy()
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        words = array.view(np.int32) if array.dtype in (np.float32, np.uint32) else array
        packed[start : start + array.size] = words.reshape(-1)
        start += size
    parts = host.to(device, non_blocking=True).split(sizes)
    return [
        (part.view(torch.float32) if array.dtype == np.float32 else part)[: array.size].view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


@dataclass(slots=True)
class HostCopy:
    """A copy to the host that is under way; `arrays` waits for this copy and for nothing queued behind it."""

    _tensors: list[torch.Tensor]
    _done: "torch.cuda.Event | None"

    @classmethod
    def start(cls, tensors: list[torch.Tensor]) -> "HostCopy":
        if not tensors[0].is_cuda:
            return cls(tensors, None)
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        done = torch.cuda.Event()
        done.record()
        return cls(copies, done)

    def arrays(self) -> list[np.ndarray]:
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
