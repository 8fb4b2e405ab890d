"""The KV memory of a whole model: one pool, or two where some layers see a sliding window only.

A window pool holds far fewer blocks, and its layers are the majority in the families that have them: for OLMo 3 at
32,768 tokens it cuts the KV memory of a sequence to a third.
"""

from dataclasses import replace

import numpy as np
import torch

from inference.model.architecture import Architecture
from inference.model.attention import KVPool

Copies = list[tuple[int, int]]


class KVPools:
    def __init__(
        self,
        arch: Architecture,
        num_blocks: int,
        num_window_blocks: int | None,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_window_blocks` None: sliding layers use the blocks of the others."""
        slides = [layer.window is not None and num_window_blocks is not None for layer in arch.layers]
        self.full, self.windowed = (
            KVPool(
                replace(arch, layers=tuple(layer for layer, s in zip(arch.layers, slides, strict=True) if s == kind)),
                count,
                block_size=block_size,
                dtype=dtype,
                device=device,
            )
            for kind, count in ((False, num_blocks), (True, num_window_blocks or 0))
        )
        self._layers = [
            (self.windowed if slide else self.full).layer(slides[:index].count(slide))
            for index, slide in enumerate(slides)
        ]

        self.block_size = block_size
        self.block_step = self.full.data_LB2KX.shape[2:].numel() * dtype.itemsize
        """bytes from a block of a layer to the next"""
        self.addresses_L2 = np.array([[part.data_ptr() for part in layer] for layer in self._layers], np.int64)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer of the model, as `KVPool.layer` says."""
        return self._layers[index]

    def copy_blocks(self, copies: Copies, window_copies: Copies) -> None:
        if copies:
            self.full.copy_blocks(copies)
        if window_copies:
            self.windowed.copy_blocks(window_copies)

    @property
    def int8(self) -> bool:
        return self.full.data_LB2KX.dtype == torch.int8

    @property
    def num_bytes(self) -> int:
        return self.full.data_LB2KX.nbytes + self.windowed.data_LB2KX.nbytes
