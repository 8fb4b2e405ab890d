"""Weights as whole numbers with a scale and a zero for each group of inputs: what GPTQ and AWQ checkpoints can say.

weight = (number - zero) * scale, numbers of 0 to 2^bits - 1, scales in float16 as they are stored.

Suffixes: N outputs, K inputs, G groups, S inputs of a group.
"""

from dataclasses import dataclass

import torch

_SMALLEST = 2.0**-24  # of float16


@dataclass(frozen=True, slots=True)
class Grid:
    bits: int
    group_size: int
    symmetric: bool
    """zero in the middle; else wherever it makes the numbers span the group's weights"""

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    def fit(self, weight_NS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero of each group, [N], in float32."""
        if self.symmetric:
            scale_N = 2 * weight_NS.abs().amax(-1) / self.top
        else:
            low_N, high_N = weight_NS.amin(-1).clamp(max=0), weight_NS.amax(-1).clamp(min=0)
            scale_N = (high_N - low_N) / self.top
        scale_N = scale_N.clamp(min=_SMALLEST).half().float()
        if self.symmetric:
            return scale_N, torch.full_like(scale_N, 1 << (self.bits - 1))
        return scale_N, torch.round(-low_N / scale_N).clamp(0, self.top)

    def round(self, weight_N: torch.Tensor, scale_N: torch.Tensor, zero_N: torch.Tensor) -> torch.Tensor:
        return torch.round(weight_N / scale_N + zero_N).clamp(0, self.top)


@dataclass(frozen=True, slots=True)
class Quantized:
    numbers_NK: torch.Tensor
    """uint8"""
    scales_GN: torch.Tensor
    zeros_GN: torch.Tensor
    group_K: torch.Tensor
    """which group an input is of"""

    def dense(self) -> torch.Tensor:
        """[N, K] float32"""
        return ((self.numbers_NK - self.zeros_GN[self.group_K].T) * self.scales_GN[self.group_K].T).float()

    def outputs(self, first: int, count: int) -> "Quantized":
        rows = slice(first, first + count)
        return Quantized(self.numbers_NK[rows], self.scales_GN[:, rows], self.zeros_GN[:, rows], self.group_K)


def round_to_nearest(weight_NK: torch.Tensor, grid: Grid) -> Quantized:
    """Of whole groups."""
    weight_NGS = weight_NK.float().unflatten(1, (-1, grid.group_size))
    scale_NG, zero_NG = grid.fit(weight_NGS)
    numbers_NGS = grid.round(weight_NGS, scale_NG[:, :, None], zero_NG[:, :, None])
    group_K = torch.arange(weight_NK.shape[1], device=weight_NK.device) // grid.group_size
    return Quantized(numbers_NGS.flatten(1).to(torch.uint8), scale_NG.T, zero_NG.T, group_K)


def output_square(weight_NK: torch.Tensor, hessian_KK: torch.Tensor) -> torch.Tensor:
    """|x W|^2 over the tokens x whose products `hessian_KK` sums up."""
    return ((weight_NK.float() @ hessian_KK) * weight_NK.float()).sum()


def output_error(weight_NK: torch.Tensor, other_NK: torch.Tensor, hessian_KK: torch.Tensor) -> float:
    """|x (W - W')| / |x W|"""
    lost = output_square(weight_NK - other_NK, hessian_KK)
    whole = output_square(weight_NK, hessian_KK)
    return float((lost / whole.clamp(min=1e-30)).clamp(min=0).sqrt())
