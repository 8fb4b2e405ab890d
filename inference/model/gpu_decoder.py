"""The decoder on a GPU: a step's arrays on the device, and the layers as matrix products of torch between Triton
kernels.

Whatever a kernel's launch depends on (tile shape, splits) follows from the shape of the batch alone and never from a
context length, so that a captured step can be replayed while contexts grow.

Twin: `inference.model.decoder.Decoder.forward_torch`.

Suffixes: T tokens, M hidden size, X features, N tiles of tokens, C chunks, R rows of the block table.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inference.device_copy import to_device
from inference.kernels.gpu_attention import AttentionShape, AttentionStep, Tiles, attend, attention_shape
from inference.kernels.gpu_heads import norm_rope_store
from inference.kernels.gpu_launch import interpreted
from inference.kernels.gpu_norm import add_rms_norm, gated_silu, rms_norm, rms_norm_add
from inference.kernels.gpu_quantized import quantized_linear
from inference.model import layers
from inference.model.attention import AttentionInput
from inference.model.kv_pools import KVPools
from inference.model.step_tensors import moved
from inference.quantization.formats import BY_DTYPE
from inference.step_batch import StepBatch
from olmorl.contract.errors import ConfigError

if TYPE_CHECKING:
    from inference.model.decoder import Decoder, LayerWeights


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step as the kernels read it. A row that only fills up may have position and slot -1: it is left alone."""

    token_ids_T: torch.Tensor
    slots_T: torch.Tensor
    attention: AttentionStep
    window_slots_T: torch.Tensor
    window_attention: AttentionStep


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
        return self.forward_on_device(self.place(batch), pools)

    def place(self, batch: StepBatch) -> DeviceStep:
        """Looks at the host's arrays only where a chunk has several tokens: what only decodes may be captured."""
        batch = moved(batch, self._decoder.device)
        step, window_step = batch.tensors, (batch.windowed or batch).tensors
        assert step is not None and window_step is not None
        parts = (self._single_tokens(step.rows_T),) if batch.only_decodes else self._parts(batch)
        return DeviceStep(
            step.token_ids_T,
            step.slots_T,
            AttentionStep(step.positions_T, step.block_table_RW, parts),
            window_step.slots_T,
            AttentionStep(step.positions_T, window_step.block_table_RW, parts),
        )

    def _single_tokens(self, rows_T: torch.Tensor) -> Tiles:
        rows_T = rows_T.to(torch.int32)
        first_T = torch.arange(len(rows_T), dtype=torch.int32, device=rows_T.device)
        return Tiles(torch.stack([first_T, torch.ones_like(rows_T), rows_T], 1), 1, self._shape(decode=True))

    def _parts(self, batch: StepBatch) -> tuple[Tiles, ...]:
        counts_C = np.diff(batch.chunk_ends_C, prepend=0)
        starts_C = batch.chunk_ends_C - counts_C
        rows_C = batch.rows_T[starts_C]
        arch = self._decoder.local
        kinds = []
        for single in (True, False):
            chosen = (counts_C == 1) == single
            if chosen.any():
                shape = self._shape(decode=single)
                room = shape.block_m // (arch.num_heads // arch.num_kv_heads)
                size = min(room, int(counts_C[chosen].max()))
                kinds.append((make_tiles(starts_C[chosen], counts_C[chosen], rows_C[chosen], size), size, shape))
        placed = to_device([tiles for tiles, _, _ in kinds], self._decoder.device)
        return tuple(Tiles(tiles, size, shape) for tiles, (_, size, shape) in zip(placed, kinds, strict=True))

    def _shape(self, *, decode: bool) -> AttentionShape:
        arch = self._decoder.local
        return attention_shape(
            group=arch.num_heads // arch.num_kv_heads,
            head_dim=arch.head_dim,
            dtype=self._decoder.dtype,
            decode=decode,
        )

    def forward_on_device(self, step: DeviceStep, pools: KVPools) -> torch.Tensor:
        """`forward` without a look at the host: what a CUDA graph captures."""
        decoder, eps = self._decoder, self._decoder.arch.norm_eps
        pre = decoder.arch.norms == "pre"
        x_TM = decoder.embed(step.token_ids_T)
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
            y_TM = gated_silu(self._linear(h_TM, layer.gate_up, layer.gate_up_bias))
            y_TM = self._summed_linear(y_TM, layer.down, layer.down_bias)
            if not pre:
                rms_norm_add(x_TM, y_TM, layer.mlp_norm, eps)
        return _join(x_TM, y_TM if pre else None, decoder.norm, eps)

    def _attention(
        self, h_TM: torch.Tensor, layer: "LayerWeights", index: int, step: DeviceStep, pools: KVPools
    ) -> torch.Tensor:
        heads = layer.attention
        keys_BKDS, values_BKSD = pools.layer(index)
        qkv_TX = self._linear(h_TM, layer.qkv, layer.qkv_bias)
        q_norm, k_norm, qk_norm = heads.q_norm, heads.k_norm, heads.qk_norm
        if qk_norm == "whole" and heads.ranks.size > 1:  # the mean is over all ranks, which a kernel does not reach
            self._norm_over_ranks(qkv_TX, heads)
            q_norm = k_norm = qk_norm = None
        sliding = heads.window is not None
        attention = step.window_attention if sliding else step.attention
        norm_rope_store(
            qkv_TX,
            q_norm,
            k_norm,
            heads.rope_2PF,
            attention.positions_T,
            step.window_slots_T if sliding else step.slots_T,
            keys_BKDS,
            values_BKSD,
            num_heads=heads.num_heads,
            qk_norm=qk_norm,
            eps=heads.norm_eps,
        )
        out_TX = attend(
            qkv_TX,
            keys_BKDS,
            values_BKSD,
            attention,
            num_heads=heads.num_heads,
            window=heads.window,
            num_processors=self._num_processors,
        )
        return self._summed_linear(out_TX, layer.out, layer.out_bias)

    @staticmethod
    def _linear(x_TX: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.dtype in BY_DTYPE:
            return quantized_linear(x_TX, weight, bias)
        return layers.linear(x_TX, weight, bias)

    def _summed_linear(self, x_TX: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.dtype in BY_DTYPE:  # which only a decoder on one device has
            return quantized_linear(x_TX, weight, bias)
        return self._decoder.summed_linear(x_TX, weight, bias)

    def logits(self, hidden_RM: torch.Tensor, head_VM: torch.Tensor) -> torch.Tensor:
        """[R, V] float32"""
        if head_VM.dtype in BY_DTYPE:
            return quantized_linear(hidden_RM, head_VM, dtype=torch.float32)
        return layers.head_logits(hidden_RM, head_VM)

    @staticmethod
    def _norm_over_ranks(qkv_TX: torch.Tensor, heads: AttentionInput) -> None:
        width, kv_width = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        for part_TX, weight in zip(
            qkv_TX.split([width, kv_width, kv_width], 1), (heads.q_norm, heads.k_norm), strict=False
        ):
            assert weight is not None
            part_TX.copy_(layers.rms_norm(part_TX, weight, heads.norm_eps, heads.ranks))


def make_tiles(starts_C: np.ndarray, counts_C: np.ndarray, rows_C: np.ndarray, tokens_per_tile: int) -> np.ndarray:
    """[N, 3]: first token, number of tokens and row of the block table of tiles of at most `tokens_per_tile` tokens."""
    tiles_C = -(-counts_C // tokens_per_tile)
    chunk_N = np.repeat(np.arange(len(counts_C)), tiles_C)
    offset_N = (np.arange(len(chunk_N)) - np.repeat(np.cumsum(tiles_C) - tiles_C, tiles_C)) * tokens_per_tile
    count_N = np.minimum(counts_C[chunk_N] - offset_N, tokens_per_tile)
    return np.stack([starts_C[chunk_N] + offset_N, count_N, rows_C[chunk_N]], axis=1)


def _join(x_TM: torch.Tensor, y_TM: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x), of x + y where there is a y still to be added"""
    return rms_norm(x_TM, weight, eps) if y_TM is None else add_rms_norm(x_TM, y_TM, weight, eps)
