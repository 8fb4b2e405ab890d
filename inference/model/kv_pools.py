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
        self._pools: dict[bool, KVPool] = {}
        for kind, count in ((False, num_blocks), (True, num_window_blocks or 0)):
            layers = tuple(layer for layer, slide in zip(arch.layers, slides, strict=True) if slide == kind)
            if layers:
                shape = replace(arch, layers=layers)
                self._pools[kind] = KVPool(shape, count, block_size=block_size, dtype=dtype, device=device)
        self._layers = [self._pools[kind].layer(slides[:index].count(kind)) for index, kind in enumerate(slides)]
        self.block_size = block_size
        self.block_step = 2 * arch.num_kv_heads * block_size * arch.head_dim * dtype.itemsize
        """bytes from a block of a layer to the next"""
        self.addresses_L2 = np.array([[part.data_ptr() for part in layer] for layer in self._layers], np.int64)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, K, D, S] and values [B, K, S, D] of one layer of the model."""
        return self._layers[index]

    def copy_blocks(self, copies: Copies, window_copies: Copies) -> None:
        for kind, wanted in ((False, copies), (True, window_copies)):
            if wanted and kind in self._pools:
                self._pools[kind].copy_blocks(wanted)

    @property
    def num_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)
