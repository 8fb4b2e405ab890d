"""The paged KV pool, and attention over it in torch: the definition of what compiled kernels compute.

Suffixes: T tokens, H heads (queries, then keys, then values), D head size, B blocks, K key heads, S block size,
L layers, C context length, N tokens of one chunk, X = S * D.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from inference.model import kv_int8
from inference.model.architecture import Architecture
from inference.model.layers import rms_norm, rotate
from inference.model.step_tensors import tensors_of
from inference.model.tensor_parallel import ALONE, TensorParallel
from inference.step_batch import StepBatch

_NUMPY = {torch.int8: np.int8}


class KVPool:
    """Keys and values of all layers. Zeroed pages cost nothing until they are written.

    On a CPU keys lie transposed in their block, so that neighbouring keys fill a vector register; on a GPU a key lies
    in one piece, as values do. With dtype int8 both are as `inference.model.kv_int8` says.
    """

    def __init__(
        self, arch: Architecture, num_blocks: int, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        head_size = arch.head_dim + kv_int8.SCALE_BYTES * (dtype == torch.int8)
        shape = (len(arch.layers), num_blocks, 2, arch.num_kv_heads, block_size * head_size)
        self.transposed = device.type == "cpu"
        if device.type == "cpu":
            # numpy asks for large pages, torch does not: blocks lie all over the pool, and each would miss small ones.
            self.data_LB2KX = torch.from_numpy(np.zeros(shape, _NUMPY.get(dtype, np.float32))).to(dtype)
        else:
            self.data_LB2KX = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, K, D, S] and values [B, K, S, D] of one layer; in int8 both [B, K, X]."""
        keys_BKX, values_BKX = self.data_LB2KX[index].unbind(1)
        if self.data_LB2KX.dtype == torch.int8:
            return keys_BKX, values_BKX
        values_BKSD = values_BKX.unflatten(2, (self.block_size, -1))
        if self.transposed:
            return keys_BKX.unflatten(2, (-1, self.block_size)), values_BKSD
        return keys_BKX.unflatten(2, (self.block_size, -1)).transpose(2, 3), values_BKSD

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = (torch.tensor(blocks, device=self.data_LB2KX.device) for blocks in zip(*copies, strict=True))
        self.data_LB2KX[:, target] = self.data_LB2KX[:, source]


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What one layer's attention needs beside the projections."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qk_norm: str | None
    norm_eps: float
    rope_2PF: torch.Tensor
    window: int | None
    ranks: TensorParallel = ALONE
    """among which the heads are divided"""


def attend(
    qkv_TX: torch.Tensor,
    layer: AttentionInput,
    keys_BKDS: torch.Tensor,
    values_BKSD: torch.Tensor,
    batch: StepBatch,
) -> torch.Tensor:
    """[T, H*D]. Writes the step's keys and values to the pool, then attends densely to the keys gathered per chunk."""
    device = qkv_TX.device
    step = tensors_of(batch, device)
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    q_THD, k_TKD, v_TKD = qkv_TX.view(len(qkv_TX), -1, layer.head_dim).split(sizes, dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q_THD = _norm(q_THD, layer.q_norm, layer)
        k_TKD = _norm(k_TKD, layer.k_norm, layer)
    positions_T, slots_T = step.positions_T, step.slots_T
    cos_TF, sin_TF = layer.rope_2PF[:, positions_T]
    q_THD, k_TKD = rotate(q_THD, cos_TF, sin_TF), rotate(k_TKD, cos_TF, sin_TF)
    int8 = keys_BKDS.dtype == torch.int8
    block_size = keys_BKDS.shape[2] // (layer.head_dim + kv_int8.SCALE_BYTES) if int8 else keys_BKDS.shape[3]
    if int8:
        kv_int8.store(keys_BKDS, slots_T, k_TKD, keys=True)
        kv_int8.store(values_BKSD, slots_T, v_TKD, keys=False)
    else:
        keys_BKDS[slots_T // block_size, :, :, slots_T % block_size] = k_TKD
        values_BKSD[slots_T // block_size, :, slots_T % block_size] = v_TKD

    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    start = 0
    for end in batch.chunk_ends_C.tolist():
        context = int(batch.positions_T[end - 1]) + 1
        window = layer.window or context
        first = max(0, int(batch.positions_T[start]) + 1 - window) // block_size  # blocks before it may be gone
        begin = first * block_size
        blocks = step.block_table_RW[int(batch.rows_T[start]), first : -(-context // block_size)].long()
        if int8:
            k_KCD = kv_int8.gather(keys_BKDS, blocks, layer.head_dim, keys=True).to(q_THD.dtype)
            v_KCD = kv_int8.gather(values_BKSD, blocks, layer.head_dim, keys=False).to(q_THD.dtype)
        else:
            k_KCD = keys_BKDS[blocks].permute(1, 0, 3, 2).flatten(1, 2)
            v_KCD = values_BKSD[blocks].transpose(0, 1).flatten(1, 2)
        k_KCD, v_KCD = k_KCD[:, : context - begin], v_KCD[:, : context - begin]
        distance_NC = positions_T[start:end, None] - torch.arange(begin, context, device=device)
        seen_NC = (distance_NC >= 0) & (distance_NC < window)
        q_HND = q_THD[start:end].transpose(0, 1)
        out_HND = F.scaled_dot_product_attention(q_HND[None], k_KCD[None], v_KCD[None], seen_NC, enable_gqa=True)[0]
        out_THD[start:end] = out_HND.transpose(0, 1)
        start = end
    return out_THD.flatten(1)


def _norm(x_THD: torch.Tensor, weight: torch.Tensor, layer: AttentionInput) -> torch.Tensor:
    if layer.qk_norm == "head":
        return rms_norm(x_THD, weight, layer.norm_eps)
    return rms_norm(x_THD.flatten(1), weight, layer.norm_eps, layer.ranks).view_as(x_THD)
