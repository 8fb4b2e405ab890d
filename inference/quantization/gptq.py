"""GPTQ: input by input, a weight is rounded and what that cost is made up for by the inputs still to come.

From the paper (Frantar et al. 2022): the Cholesky factor of the inverse Hessian has, in row i, how an error at input i
is spread; columns go in blocks, so that the spread to the rest is one matrix product a block. With `desc_act` inputs go
in the order of their size, largest first, and groups are made in that order.

Suffixes: N outputs, K inputs, S inputs of a block.
"""

import torch

from inference.quantization.grid import Grid, Quantized

_BLOCK = 128
DAMPING = 0.01  # of the Hessian's mean diagonal, added to it


def gptq(weight_NK: torch.Tensor, hessian_KK: torch.Tensor, grid: Grid, *, desc_act: bool = False) -> Quantized:
    """`hessian_KK`: the sum of x x^T over tokens x."""
    features = weight_NK.shape[1]
    order_K = torch.arange(features, device=weight_NK.device)
    if desc_act:
        order_K = hessian_KK.diagonal().argsort(descending=True, stable=True)
    w_NK = weight_NK.float()[:, order_K].clone()
    spread_KK = _spread(hessian_KK[order_K][:, order_K])
    numbers_NK, scales, zeros = torch.empty_like(w_NK), [], []
    for start in range(0, features, _BLOCK):
        stop = min(start + _BLOCK, features)
        errors_NS = torch.empty_like(w_NK[:, start:stop])
        for k in range(start, stop):
            if k % grid.group_size == 0:
                scale_N, zero_N = grid.fit(w_NK[:, k : k + grid.group_size])
                scales.append(scale_N)
                zeros.append(zero_N)
            numbers_NK[:, k] = grid.round(w_NK[:, k], scale_N, zero_N)
            off_N = w_NK[:, k] - (numbers_NK[:, k] - zero_N) * scale_N
            errors_NS[:, k - start] = off_N / spread_KK[k, k]
            # To the end of the block, and of a group that begins in it, whose range is taken from these weights.
            w_NK[:, k:stop] -= errors_NS[:, k - start, None] * spread_KK[k, k:stop]
        w_NK[:, stop:] -= errors_NS @ spread_KK[start:stop, stop:]
    back_K = order_K.argsort()
    return Quantized(
        numbers_NK[:, back_K].to(torch.uint8), torch.stack(scales), torch.stack(zeros), back_K // grid.group_size
    )


def _spread(hessian_KK: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse, in float32. Inputs that were always 0 stand alone."""
    damped_KK = hessian_KK.double().clone()
    diagonal_K = damped_KK.diagonal()
    diagonal_K[diagonal_K == 0] = 1
    diagonal_K += DAMPING * diagonal_K.mean()
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(damped_KK))
    return torch.linalg.cholesky(inverse_KK, upper=True).float()
