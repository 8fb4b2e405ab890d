"""int8 weights with a scale for each output, times 16-bit tokens with a scale each, in torch.

A matrix is one int8 tensor, so that slices of its rows can be named, staged and copied like those of any weight. A row
is its weights in their order, zeros up to a multiple of 4, then 4 bytes of float32 scale and 4 of int32: -128 times the
sum of the weights, which the compiled kernels need (`inference.kernels.cpu_int8_tile`; this is their definition).

Symmetric rounding to nearest: weight = scale * w, scale = largest magnitude of the row / 127; a token likewise, in
steps of its largest magnitude / 32767. Its scale follows from that token alone: its result does not depend on its
batch.

Suffixes: N outputs, K inputs, T tokens, B bytes of a row.
"""

import torch
import torch.nn.functional as F

WEIGHT_LEVELS, TOKEN_LEVELS = 127, 32767
SMALLEST = 1e-30  # what the largest magnitude counts as at least: its reciprocal stays finite
MAX_FEATURES = 1 << 16  # sums of 255 * 127 stay within int32
_TAIL = 8


def row_bytes(num_features: int) -> int:
    return -(-num_features // 4) * 4 + _TAIL


def quantize_rows(weight_NK: torch.Tensor) -> torch.Tensor:
    """[N, B] int8"""
    q_NK, scale_N = _quantize(weight_NK, WEIGHT_LEVELS)
    sums_N = q_NK.sum(1, dtype=torch.int32) * -128
    tail_N2 = torch.stack([scale_N.view(torch.int32), sums_N], dim=1)
    padding = -weight_NK.shape[1] % 4
    return torch.cat([F.pad(q_NK.to(torch.int8), (0, padding)), tail_N2.view(torch.int8)], dim=1)


def dequantize_rows(rows_NB: torch.Tensor, num_features: int) -> torch.Tensor:
    """[N, K] float32: what the rows stand for."""
    return rows_NB[:, :num_features].float() * _scales(rows_NB)[:, None]


def int8_linear(x_TK: torch.Tensor, rows_NB: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    q_TK, scale_T = _quantize(x_TK, TOKEN_LEVELS)
    weights_KN = rows_NB[:, : x_TK.shape[-1]].T.double()
    high_TK = torch.floor(q_TK.double() / 256)
    low_TK = q_TK.double() - 256 * high_TK
    high_TN, low_TN = ((part_TK @ weights_KN).float() for part_TK in (high_TK, low_TK))  # exact, as integers are
    y_TN = (high_TN * 256 + low_TN) * _scales(rows_NB) * scale_T[:, None]
    return (y_TN if bias_N is None else y_TN + bias_N).to(x_TK.dtype)


def _quantize(x_RK: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, as floats; and what one of them is worth, [R]."""
    x_RK = x_RK.float()
    largest_R = x_RK.abs().amax(1).clamp(min=SMALLEST)
    levels_R = torch.full_like(
        largest_R, levels
    )  # a number over a tensor would be taken as a reciprocal, rounded twice
    return torch.round(x_RK * (levels_R / largest_R)[:, None]), largest_R / levels_R


def _scales(rows_NB: torch.Tensor) -> torch.Tensor:
    return rows_NB[:, -_TAIL:-4].contiguous().view(torch.float32)[:, 0]
