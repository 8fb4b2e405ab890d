"""AWQ: inputs that carry large values get finer steps. Their weights are scaled up before rounding, and what makes the
inputs is scaled down by as much, so that the model computes the same.

From the paper (Lin et al. 2023): scale = size of the input to the power of a ratio, the ratio searched for. Here the
size is a root mean square and the error that of the output, both read off the same sums as GPTQ's; weights are not
clipped.

Suffixes: N outputs, K inputs.
"""

import torch

from inference.quantization.grid import Grid, output_square, round_to_nearest

_RATIOS = 20


def best_scale(weight_NK: torch.Tensor, hessian_KK: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[K], for which rounding `weight_NK` times it, and dividing again, costs the outputs least; ones if nothing is
    better."""
    size_K = hessian_KK.diagonal().sqrt().clamp(min=1e-8)
    best_K, least = torch.ones_like(size_K), float("inf")
    for step in range(_RATIOS):
        scale_K = size_K ** (step / _RATIOS)
        scale_K = (scale_K / (scale_K.max() * scale_K.min()).sqrt()).clamp(min=1e-4)
        rounded_NK = round_to_nearest(weight_NK * scale_K, grid).dense() / scale_K
        error = float(output_square(weight_NK - rounded_NK, hessian_KK))
        if error < least:
            best_K, least = scale_K, error
    return best_K
