"""int8 weights with a scale for each output, times 16-bit tokens with a scale each, in torch.

A row is its weights in their order, zeros up to a multiple of 4, then 4 bytes of float32 scale and 4 of int32: -128
times the sum of the weights, which the compiled kernels need (`inference.kernels.cpu_int8_tile`; this is their
definition).

Symmetric rounding to nearest: weight = scale * w, scale = largest magnitude of the row / 127; a token likewise, in
steps of its largest magnitude / 32639. Its scale follows from that token alone: its result does not depend on its
batch.

Suffixes: N outputs, K inputs, T tokens, B bytes of a row.
"""

import torch
import torch.nn.functional as F

from inference.quantization.rows import symmetric, token_digits
from inference.quantization.sizes import int8_row_bytes, tail_at

WEIGHT_LEVELS = 127
MAX_FEATURES = 1 << 16  # sums of 255 * 127 stay within int32


def quantize_rows(weight_NK: torch.Tensor) -> torch.Tensor:
    """[N, B] int8"""
    num_features = weight_NK.shape[1]
    q_NK, scale_N = symmetric(weight_NK, WEIGHT_LEVELS)
    sums_N = q_NK.sum(1, dtype=torch.int32) * -128
    tail_N2 = torch.stack([scale_N.view(torch.int32), sums_N], dim=1)
    padded_NK = F.pad(q_NK.to(torch.int8), (0, tail_at(num_features) - num_features))
    rows_NB = torch.cat([padded_NK, tail_N2.view(torch.int8)], dim=1)
    return F.pad(rows_NB, (0, int8_row_bytes(num_features) - rows_NB.shape[1]))


def dequantize_rows(rows_NB: torch.Tensor, num_features: int) -> torch.Tensor:
    """[N, K] float32: what the rows stand for."""
    return rows_NB[:, :num_features].float() * _scales(rows_NB, num_features)[:, None]


def int8_linear(x_TK: torch.Tensor, rows_NB: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    num_features = x_TK.shape[-1]
    weights_KN = rows_NB[:, :num_features].T.double()
    high_TK, low_TK, scale_T = token_digits(x_TK)
    high_TN, low_TN = ((part_TK @ weights_KN).float() for part_TK in (high_TK, low_TK))  # exact, as integers are
    y_TN = (high_TN * 256 + low_TN) * _scales(rows_NB, num_features) * scale_T[:, None]
    return (y_TN if bias_N is None else y_TN + bias_N).to(x_TK.dtype)


def _scales(rows_NB: torch.Tensor, num_features: int) -> torch.Tensor:
    start = tail_at(num_features)
    return rows_NB[:, start : start + 4].contiguous().view(torch.float32)[:, 0]
