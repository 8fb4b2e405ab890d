"""What the formats of quantised weights share: tokens as whole numbers, rounding, and which tensor is in which format.

A matrix is one tensor of bytes, a row an output, so that slices of its rows can be named, staged and copied like those
of any weight. Rows are a multiple of 16 bytes long, for a GPU loads no less at once.

Suffixes: N outputs, K inputs, T tokens, R rows of either.
"""

import torch

SMALLEST = 1e-30  # what the largest magnitude counts as at least: its reciprocal stays finite
TOKEN_LEVELS = 32639  # to either side: 127 * 256 + 127, so that both digits are signed bytes


def symmetric(x_RK: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, as floats, of -levels to levels; and what one of them is worth, [R]."""
    x_RK = x_RK.float()
    largest_R = x_RK.abs().amax(1).clamp(min=SMALLEST)
    levels_R = torch.full_like(largest_R, levels)  # a number over a tensor is taken as a reciprocal, rounded twice
    return torch.round(x_RK * (levels_R / largest_R)[:, None]), largest_R / levels_R


def token_digits(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token is 256 * high + low of the scale that follows; both within -127 and 127 or 128, in float64."""
    q_TK, scale_T = symmetric(x_TK, TOKEN_LEVELS)
    high_TK = torch.floor((q_TK.double() + 128) / 256)
    return high_TK, q_TK.double() - 256 * high_TK, scale_T
