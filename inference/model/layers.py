"""The pieces of a decoder layer as plain functions on tensors, in transformers' numerics.

Suffixes: T tokens of a step, M hidden size, D head size, P positions, F half of D.
"""

import torch
import torch.nn.functional as F

from inference.model.frequencies import rope_frequencies
from inference.model.rope import Rope
from inference.model.tensor_parallel import ALONE, TensorParallel
from inference.quantization.formats import BY_DTYPE

_HEAD_ROWS = 8192  # of the head, widened at once


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: TensorParallel = ALONE) -> torch.Tensor:
    """Over the last dimension, in float32; over that of all `ranks` together where each has a part of it."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(ranks.mean(x32.square().mean(-1, keepdim=True)) + eps)
    return weight * normed.to(x.dtype)


def linear(x_TM: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`weight` may be quantised rows, see `inference.quantization.formats`."""
    if weight.dtype in BY_DTYPE:
        return BY_DTYPE[weight.dtype].linear(x_TM, weight, bias)
    return F.linear(x_TM, weight, bias)


def head_logits(hidden_RM: torch.Tensor, head_VM: torch.Tensor) -> torch.Tensor:
    """[R, V] float32, summed in float32 and never rounded to the model's dtype. The head may be quantised rows."""
    if head_VM.dtype in BY_DTYPE:
        return BY_DTYPE[head_VM.dtype].linear(hidden_RM.float(), head_VM, None)
    if head_VM.dtype == torch.float32:
        return F.linear(hidden_RM, head_VM)
    if head_VM.is_cuda:
        return torch.mm(hidden_RM, head_VM.T, out_dtype=torch.float32)
    parts = [hidden_RM.float() @ part_VM.float().T for part_VM in head_VM.split(_HEAD_ROWS)]
    return torch.cat(parts, dim=1)


def gated_silu(gate_up_TM: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_TM.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_table(rope: Rope, *, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """[2, P, F] float32: cosines and sines."""
    frequencies_F = rope_frequencies(rope, head_dim=head_dim).to(device)
    angles_PF = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies_F
    return torch.stack([angles_PF.cos(), angles_PF.sin()]) * rope.magnitude


def rotate(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of the half-split kind; computed in float32."""
    low, high = x_THD.float().chunk(2, dim=-1)
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x_THD.dtype)
