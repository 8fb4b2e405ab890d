"""AWQ: inputs that carry large values get finer steps. Their weights are scaled up before rounding, and what makes the
inputs is scaled down by as much, so that the model computes the same.

From the paper (Lin et al. 2023): scale = size of the input to the power of a ratio, the ratio searched for. Here the
size is a root mean square and the error that of the output, both read off the same sums as GPTQ's; weights are not
clipped.

Suffixes: N outputs, K inputs.
"""

from functools import cache

import torch

from inference.quantization.grid import Grid, output_square, round_to_nearest

_RATIOS = 20
_STRIDES = (4, 2, 1)  # over the ratios: first all, then beside the best


def best_scale(weight_NK: torch.Tensor, hessian_KK: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[K], for which rounding `weight_NK` times it, and dividing again, costs the outputs least; ones if nothing is
    better."""
    size_K = hessian_KK.diagonal().sqrt().clamp(min=1e-8)

    def scale(step: int) -> torch.Tensor:
        scale_K = size_K ** (step / _RATIOS)
        return (scale_K / (scale_K.max() * scale_K.min()).sqrt()).clamp(min=1e-4)

    @cache
    def error(step: int) -> float:
        scale_K = scale(step)
        rounded_NK = round_to_nearest(weight_NK * scale_K, grid).dense() / scale_K
        return float(output_square(weight_NK - rounded_NK, hessian_KK))

    best = min(range(0, _RATIOS, _STRIDES[0]), key=error)
    for stride in _STRIDES[1:]:
        best = min((best, max(best - stride, 0), min(best + stride, _RATIOS - 1)), key=error)
    return scale(best)
