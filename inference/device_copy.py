"""Small arrays to a device as one copy out of pinned memory, for which neither side waits."""

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
