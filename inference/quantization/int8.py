"""int8 weights with a scale for each output, times int8 tokens with a scale each, in torch.

A matrix is one int8 tensor, so that slices of its rows can be named, staged and copied like those of any weight. A row
is its weights in their order, zeros up to a multiple of 4, then 4 bytes of float32 scale and 4 of int32: -128 times the
sum of the weights, which the compiled kernels need (`inference.kernels.cpu_int8_tile`; this is their definition).

Symmetric rounding to nearest: weight = scale * w, scale = largest magnitude of the row / 127. A token's scale follows
from that token alone, hence its result does not depend on its batch.

Suffixes: N outputs, K inputs, T tokens, B bytes of a row.
"""

import torch
import torch.nn.functional as F

LEVELS = 127
SMALLEST = 1e-30  # what the largest magnitude counts as at least: its reciprocal stays finite
MAX_FEATURES = 1 << 16  # sums of 255 * 127 stay within int32
_TAIL = 8


def row_bytes(num_features: int) -> int:
    return -(-num_features // 4) * 4 + _TAIL


def quantize_rows(weight_NK: torch.Tensor) -> torch.Tensor:
    """[N, B] int8"""
    q_NK, scale_N = _quantize(weight_NK)
    sums_N = q_NK.sum(1, dtype=torch.int32) * -128
    tail_N2 = torch.stack([scale_N.view(torch.int32), sums_N], dim=1)
    padding = -weight_NK.shape[1] % 4
    return torch.cat([F.pad(q_NK, (0, padding)), tail_N2.view(torch.int8)], dim=1)


def dequantize_rows(rows_NB: torch.Tensor, num_features: int) -> torch.Tensor:
    """[N, K] float32: what the rows stand for."""
    return rows_NB[:, :num_features].float() * _scales(rows_NB)[:, None]


def int8_linear(x_TK: torch.Tensor, rows_NB: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    q_TK, scale_T = _quantize(x_TK)
    weights_NK = rows_NB[:, : x_TK.shape[-1]]
    sums_TN = q_TK.double() @ weights_NK.double().T  # exact, as integers are
    y_TN = sums_TN.float() * _scales(rows_NB) * scale_T[:, None]
    return (y_TN if bias_N is None else y_TN + bias_N).to(x_TK.dtype)


def _quantize(x_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_RK = x_RK.float()
    largest_R = x_RK.abs().amax(1).clamp(min=SMALLEST)
    q_RK = torch.round(x_RK * (LEVELS / largest_R)[:, None])
    return q_RK.to(torch.int8), largest_R / LEVELS


def _scales(rows_NB: torch.Tensor) -> torch.Tensor:
    return rows_NB[:, -_TAIL:-4].contiguous().view(torch.float32)[:, 0]
