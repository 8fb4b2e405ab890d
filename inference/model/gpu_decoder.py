"""The decoder on a GPU: a step's arrays on the device, and the layers as matrix products of torch between Triton
kernels.

Whatever a kernel's launch depends on (tile shape, splits) follows from the shape of the batch alone and never from a
context length, so that a captured step can be replayed while contexts grow.

Twin: `inference.model.decoder.Decoder.forward_torch`.

Suffixes: T tokens, M hidden size, X features, N tiles of tokens, C chunks, R rows of the block table, W its width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from inference.device_copy import to_device
from inference.kernels.gpu_attention import AttentionShape, AttentionStep, attend, attention_shape, num_splits
from inference.kernels.gpu_heads import norm_rope_store
from inference.kernels.gpu_launch import interpreted
from inference.kernels.gpu_norm import add_rms_norm, gated_silu, rms_norm, rms_norm_add
from inference.model.kv_pools import KVPools
from inference.model.layers import linear
from inference.step_batch import StepBatch
from olmorl.contract.errors import ConfigError

if TYPE_CHECKING:
    from inference.model.decoder import Decoder, LayerWeights

_ALIGNED = 16  # entries of a block table: its rows lie where Triton may assume 16 bytes


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step on the device, int32. A padded row has position and slot -1 and a tile of its own."""

    token_ids_T: torch.Tensor
    slots_T: torch.Tensor
    attention: AttentionStep
    window_slots_T: torch.Tensor
    window_attention: AttentionStep
    shape: AttentionShape


class GpuDecoder:
    def __init__(self, decoder: "Decoder") -> None:
        if decoder.device.type != "cuda" and not interpreted():
            raise ConfigError(
                f"kernels is 'triton' but device is {str(decoder.device)!r}; take device 'cuda', or set "
                "TRITON_INTERPRET=1 before the start, which interprets the kernels on a CPU and is very slow"
            )
        self._decoder = decoder
        self._num_processors = 1
        if decoder.device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(decoder.device).multi_processor_count

    def forward(self, batch: StepBatch, pools: KVPools) -> torch.Tensor:
        """[T, M] after the final norm; keys and values of the step are in `pools`."""
        return self.forward_on_device(self.place(batch, pools.block_size), pools)

    def place(self, batch: StepBatch, block_size: int) -> DeviceStep:
        """One asynchronous copy for all arrays of a step; of the block tables only the rows and columns in use."""
        arch, windowed = self._decoder.arch, batch.windowed or batch
        group = arch.num_heads // arch.num_kv_heads
        counts_C = np.diff(batch.chunk_ends_C, prepend=0)
        starts_C = batch.chunk_ends_C - counts_C
        shape = attention_shape(
            group=group, head_dim=arch.head_dim, dtype=self._decoder.dtype, decode=int(counts_C.max()) * group <= 16
        )
        tokens_per_tile = min(shape.block_m // group, int(counts_C.max()))
        tiles_N3 = make_tiles(starts_C, counts_C, tokens_per_tile)
        width = -(-(int(batch.positions_T.max()) // block_size + 1) // _ALIGNED) * _ALIGNED
        rows_C = batch.rows_T[starts_C]
        tables = [_columns(table_RW, rows_C, width) for table_RW in (batch.block_table_RW, windowed.block_table_RW)]
        parts = to_device(
            [batch.token_ids_T, batch.positions_T, batch.slots_T, windowed.slots_T, tiles_N3, *tables],
            self._decoder.device,
        )
        token_ids_T, positions_T, slots_T, window_slots_T, tiles, table, window_table = parts
        return DeviceStep(
            token_ids_T,
            slots_T,
            AttentionStep(positions_T, tiles, table, tokens_per_tile),
            window_slots_T,
            AttentionStep(positions_T, tiles, window_table, tokens_per_tile),
            shape,
        )

    def forward_on_device(self, step: DeviceStep, pools: KVPools) -> torch.Tensor:
        """`forward` without a look at the host: what a CUDA graph captures."""
        decoder, eps = self._decoder, self._decoder.arch.norm_eps
        pre = decoder.arch.norms == "pre"
        x_TM = F.embedding(step.token_ids_T, decoder.embedding)
        y_TM: torch.Tensor | None = None
        for index, layer in enumerate(decoder.layers):
            h_TM = x_TM
            if pre:
                h_TM = _join(x_TM, y_TM, layer.attention_norm, eps)
            y_TM = self._attention(h_TM, layer, index, step, pools)
            if pre:
                h_TM = add_rms_norm(x_TM, y_TM, layer.mlp_norm, eps)
            else:
                rms_norm_add(x_TM, y_TM, layer.attention_norm, eps)
            y_TM = linear(gated_silu(linear(h_TM, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
            if not pre:
                rms_norm_add(x_TM, y_TM, layer.mlp_norm, eps)
        return _join(x_TM, y_TM if pre else None, decoder.norm, eps)

    def _attention(
        self, h_TM: torch.Tensor, layer: "LayerWeights", index: int, step: DeviceStep, pools: KVPools
    ) -> torch.Tensor:
        heads = layer.attention
        keys_BKDS, values_BKSD = pools.layer(index)
        qkv_TX = linear(h_TM, layer.qkv, layer.qkv_bias)
        sliding = heads.window is not None
        attention = step.window_attention if sliding else step.attention
        norm_rope_store(
            qkv_TX,
            heads.q_norm,
            heads.k_norm,
            heads.rope_2PF,
            attention.positions_T,
            step.window_slots_T if sliding else step.slots_T,
            keys_BKDS,
            values_BKSD,
            num_heads=heads.num_heads,
            qk_norm=heads.qk_norm,
            eps=heads.norm_eps,
        )
        out_TX = attend(
            qkv_TX,
            keys_BKDS,
            values_BKSD,
            attention,
            num_heads=heads.num_heads,
            window=heads.window,
            shape=step.shape,
            splits=num_splits(
                len(attention.tiles_N3),
                heads.num_kv_heads,
                num_processors=self._num_processors,
                window=heads.window,
            ),
        )
        return linear(out_TX, layer.out, layer.out_bias)


def make_tiles(starts_C: np.ndarray, counts_C: np.ndarray, tokens_per_tile: int) -> np.ndarray:
    """[N, 3]: first token, number of tokens and chunk of each tile of at most `tokens_per_tile` tokens."""
    tiles_C = -(-counts_C // tokens_per_tile)
    chunk_N = np.repeat(np.arange(len(counts_C)), tiles_C)
    offset_N = (np.arange(len(chunk_N)) - np.repeat(np.cumsum(tiles_C) - tiles_C, tiles_C)) * tokens_per_tile
    count_N = np.minimum(counts_C[chunk_N] - offset_N, tokens_per_tile)
    return np.stack([starts_C[chunk_N] + offset_N, count_N, chunk_N], axis=1)


def _columns(table_RW: np.ndarray, rows_C: np.ndarray, width: int) -> np.ndarray:
    used_CW = np.zeros((len(rows_C), width), np.int32)
    part = table_RW[rows_C, :width]
    used_CW[:, : part.shape[1]] = part
    return used_CW


def _join(x_TM: torch.Tensor, y_TM: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x), of x + y where there is a y still to be added"""
    return rms_norm(x_TM, weight, eps) if y_TM is None else add_rms_norm(x_TM, y_TM, weight, eps)
