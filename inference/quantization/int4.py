"""int4 weights with a scale and a minimum for each group of inputs, times tokens of 16 bits, in torch.

A row is its weights in groups of `GROUP` inputs, zeros up to whole groups, 8 weights in 4 bytes: the low halves of the
bytes are the first four, the high ones the next. Behind them 4 bytes for each group: its minimum and its scale, both
bfloat16. It is the definition of what the compiled kernels compute (`inference.kernels.cpu_int4_tile`).

Rounding to nearest between the smallest and the largest weight of a group: weight = scale * w + minimum, w of 0 to 15.
A token is rounded to 16 bits as for int8, which loses nothing beside that.

Suffixes: N outputs, K inputs, T tokens, B bytes of a row, G groups, S inputs of a group.
"""

import torch
import torch.nn.functional as F

from inference.quantization.rows import SMALLEST, token_digits
from inference.quantization.sizes import GROUP, int4_row_bytes, num_groups

LEVELS = 15
MAX_FEATURES = 1 << 20  # a group's sums are small; the row's are floats


def quantize_rows(weight_NK: torch.Tensor) -> torch.Tensor:
    """[N, B] uint8"""
    num_outputs, num_features = weight_NK.shape
    x_NGS = _grouped(weight_NK.float())
    low_NG1, high_NG1 = x_NGS.amin(2, keepdim=True), x_NGS.amax(2, keepdim=True)
    steps_NG1 = torch.full_like(low_NG1, LEVELS)
    scale_NG1 = ((high_NG1 - low_NG1) / steps_NG1).clamp(min=SMALLEST).bfloat16()
    low_NG1 = low_NG1.bfloat16()
    q_NGS = torch.round((x_NGS - low_NG1.float()) / scale_NG1.float()).clamp(0, LEVELS).to(torch.uint8)
    q_NGS.view(num_outputs, -1)[:, num_features:] = 0
    first_N4, second_N4 = q_NGS.view(num_outputs, -1, 2, 4).unbind(2)
    halves_NB = (first_N4 | second_N4 << 4).view(num_outputs, -1)
    tail_NB = torch.cat([low_NG1, scale_NG1], dim=2).view(torch.uint8).view(num_outputs, -1)
    rows_NB = torch.cat([halves_NB, tail_NB], dim=1)
    return F.pad(rows_NB, (0, int4_row_bytes(num_features) - rows_NB.shape[1]))


def dequantize_rows(rows_NB: torch.Tensor, num_features: int) -> torch.Tensor:
    """[N, K] float32: what the rows stand for."""
    q_NGS, low_NG, scale_NG = _parts(rows_NB, num_features)
    weight_NGS = q_NGS.float() * scale_NG[:, :, None] + low_NG[:, :, None]
    return weight_NGS.view(len(rows_NB), -1)[:, :num_features]


def int4_linear(x_TK: torch.Tensor, rows_NB: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Sums within a group are exact; over the groups, float32 in their order."""
    high_TK, low_TK, scale_T = token_digits(x_TK)
    q_NGS, low_NG, scale_NG = _parts(rows_NB, x_TK.shape[-1])
    tokens_TGS = _grouped(high_TK * 256 + low_TK)
    sums_TG = tokens_TGS.sum(2).float()
    y_TN = torch.zeros(len(x_TK), len(rows_NB), device=x_TK.device)
    for g in range(q_NGS.shape[1]):
        product_TN = (tokens_TGS[:, g] @ q_NGS[:, g].T.double()).float()
        y_TN += product_TN * scale_NG[:, g] + sums_TG[:, g, None] * low_NG[:, g]
    y_TN *= scale_T[:, None]
    return (y_TN if bias_N is None else y_TN + bias_N).to(x_TK.dtype)


def _grouped(x_RK: torch.Tensor) -> torch.Tensor:
    num_features = x_RK.shape[1]
    return F.pad(x_RK, (0, num_groups(num_features) * GROUP - num_features)).unflatten(1, (-1, GROUP))


def _parts(rows_NB: torch.Tensor, num_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, G, S] uint8; minima and scales [N, G] float32"""
    groups = num_groups(num_features)
    tail = groups * GROUP // 2
    bytes_NX4 = rows_NB[:, :tail].unflatten(1, (-1, 4))
    q_NGS = torch.stack([bytes_NX4 & 15, bytes_NX4 >> 4], dim=2).view(len(rows_NB), groups, GROUP)
    low_NG, scale_NG = (
        rows_NB[:, tail : tail + 4 * groups].contiguous().view(torch.bfloat16).view(-1, groups, 2).float().unbind(2)
    )
    return q_NGS, low_NG, scale_NG
