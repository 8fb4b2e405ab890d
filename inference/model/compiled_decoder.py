"""The compiled decoder on a CPU: its table of weight addresses, its scratch and its threads.

Weights are updated in place and their addresses never change, so the table is made once.

Suffixes: T tokens, R wanted rows, M hidden size, V vocabulary, L layers, P panels.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from inference.kernels import cpu_attention, cpu_decoder
from inference.kernels.cpu_decoder import FIELDS, Scratch, Shape, Step
from inference.kernels.cpu_dot import SUPPORTED as HAS_DOT
from inference.kernels.cpu_int4_tile import GROUP, QUADS
from inference.kernels.cpu_team import Team, new_signals
from inference.kernels.cpu_tile import LANES
from inference.model.architecture import Architecture
from inference.model.kv_pools import KVPools
from inference.step_batch import StepBatch

if TYPE_CHECKING:
    from inference.model.decoder import Decoder, LayerWeights

_BITS = {torch.float32: 0, torch.int8: 8, torch.uint8: 4}
"""of weights, by the dtype that rows of them are stored as"""
_NORM_HEADS = {None: 0, "head": 1, "whole": 2}
_FLOPS_PER_THREAD = 2e7  # of a step; below it, one more thread costs more to wake than it computes


def can_compile(arch: Architecture, *, dtype: torch.dtype, device: torch.device, quantized: bool = False) -> bool:
    return device.type == "cpu" and dtype == torch.float32 and arch.head_dim % 8 == 0 and (HAS_DOT or not quantized)


class CompiledDecoder:
    def __init__(
        self, decoder: "Decoder", *, max_model_len: int, threads: int, flops_per_thread: float = _FLOPS_PER_THREAD
    ) -> None:
        self._decoder = decoder
        self._num_positions = max_model_len
        self._bits = _BITS[decoder.layers[0].qkv.dtype]
        self._layers_L = np.array([_addresses(layer) for layer in decoder.layers], np.int64)
        self.team = Team(threads)
        self._flops_per_thread = flops_per_thread
        self._flops_per_token = 2 * (decoder.num_parameters - decoder.embedding.numel())
        self._block_size = 1  # what the scratch has room for
        self._scratch = self._new_scratch(LANES)
        self._logits_VR = np.empty((decoder.arch.vocab_size, LANES), np.float32)

    def forward(self, batch: StepBatch, pools: KVPools) -> torch.Tensor:
        """[T, M] after the final norm; keys and values of the step are in `pools`."""
        decoder, arch = self._decoder, self._decoder.arch
        tokens = len(batch.token_ids_T)
        windowed = batch.windowed or batch
        self._grow(tokens, pools.block_size)
        hidden_TM = torch.empty((tokens, arch.hidden_size))
        self.team.run(
            cpu_decoder.forward,
            new_signals(len(arch.layers) * cpu_decoder.PIECES_PER_LAYER * self.team.threads),
            self._shape(pools),
            arch.norm_eps,
            self._layers_L,
            pools.addresses_L2,
            decoder.embedding.data_ptr(),
            decoder.norm.data_ptr(),
            Step(
                batch.token_ids_T,
                batch.positions_T,
                batch.rows_T,
                batch.slots_T,
                batch.block_table_RW,
                windowed.slots_T,
                windowed.block_table_RW,
            ),
            self._scratch,
            hidden_TM.numpy(),
            threads=self._threads_for(tokens * self._flops_per_token),
        )
        return hidden_TM

    def logits(self, hidden_RM: torch.Tensor) -> torch.Tensor:
        """[R, V], a view into memory that the next call overwrites; rows are not contiguous."""
        rows, hidden_size = hidden_RM.shape
        head = self._decoder.head
        panels = -(-rows // LANES)
        padded = panels * LANES
        if self._logits_VR.size < padded * len(head):
            self._logits_VR = np.empty((len(head), padded), np.float32)
        logits_VR = self._logits_VR.reshape(-1)[: padded * len(head)].reshape(len(head), padded)
        bits = _BITS[head.dtype]
        self.team.run(
            cpu_decoder.head,
            new_signals(self.team.threads),
            hidden_RM.numpy(),
            bits,
            head.data_ptr(),
            len(head),
            np.zeros((panels, hidden_size, LANES), np.float32),
            *quantized_scratch(panels if bits else 0, hidden_size),
            logits_VR,
            threads=self._threads_for(2 * rows * head.numel()),
        )
        return torch.from_numpy(logits_VR).T[:rows]

    def _threads_for(self, flops: float) -> int:
        return 1 + min(self.team.threads - 1, int(flops / self._flops_per_thread))

    def _shape(self, pools: KVPools) -> Shape:
        arch = self._decoder.arch
        return Shape(
            arch.hidden_size,
            arch.intermediate_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            pools.block_size,
            pools.block_step,
            int(pools.int8),
            self._num_positions,
            int(arch.norms == "pre"),
            _NORM_HEADS[arch.qk_norm],
            self._bits,
        )

    def _grow(self, tokens: int, block_size: int) -> None:
        panels = len(self._scratch.x)
        if tokens > panels * LANES or block_size > self._block_size:
            self._block_size = max(block_size, self._block_size)
            self._scratch = self._new_scratch(max(panels, -(-tokens // LANES)) * LANES)

    def _new_scratch(self, tokens: int) -> Scratch:
        arch, threads = self._decoder.arch, self.team.threads
        panels = tokens // LANES
        heads = arch.num_heads + 2 * arch.num_kv_heads

        def panel(features: int) -> np.ndarray:
            return np.zeros((panels, features, LANES), np.float32)

        return Scratch(
            panel(arch.hidden_size),
            panel(arch.hidden_size),
            panel(arch.hidden_size),
            panel(max(2 * arch.intermediate_size, heads * arch.head_dim)),
            panel(arch.num_heads * arch.head_dim),
            np.zeros((tokens, heads, arch.head_dim), np.float32),
            np.zeros((threads, arch.num_heads, cpu_attention.scores_width(self._block_size)), np.float32),
            np.zeros((threads, arch.head_dim, LANES), np.float32),
            np.zeros((threads, arch.head_dim * self._block_size), np.float32),
            np.zeros((threads, arch.num_heads, arch.head_dim), np.float32),
            *quantized_scratch(panels, max(arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim)),
            panel(-(-arch.hidden_size // cpu_decoder.PART)),
        )


def quantized_scratch(panels: int, features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Room for tokens as quantised rows take them: bytes, scales and sums of groups."""
    groups = -(-features // GROUP)
    return (
        np.zeros((panels, 2, groups * QUADS, LANES), np.int32),
        np.zeros((panels, LANES), np.float32),
        np.zeros((panels, groups, LANES), np.float32),
    )


def _addresses(layer: "LayerWeights") -> list[int]:
    attention = layer.attention
    row = [0] * len(FIELDS)
    row[FIELDS.window] = attention.window or 0
    for field, tensor in (
        (FIELDS.attention_norm, layer.attention_norm),
        (FIELDS.qkv, layer.qkv),
        (FIELDS.qkv_bias, layer.qkv_bias),
        (FIELDS.q_norm, attention.q_norm),
        (FIELDS.k_norm, attention.k_norm),
        (FIELDS.rope, attention.rope_2PF),
        (FIELDS.out, layer.out),
        (FIELDS.out_bias, layer.out_bias),
        (FIELDS.mlp_norm, layer.mlp_norm),
        (FIELDS.gate_up, layer.gate_up),
        (FIELDS.gate_up_bias, layer.gate_up_bias),
        (FIELDS.down, layer.down),
        (FIELDS.down_bias, layer.down_bias),
    ):
        if tensor is not None:
            assert tensor.is_contiguous() and tensor.dtype in _BITS, (field, tensor.dtype)
            row[field] = tensor.data_ptr()
    return row
