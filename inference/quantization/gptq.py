"""GPTQ: input by input, a weight is rounded and what that cost is made up for by the inputs still to come.

From the paper (Frantar et al. 2022): the Cholesky factor of the inverse Hessian has, in row i, how an error at input i
is spread; inputs go in blocks of whole groups, so that the spread to the rest is one matrix product a block. With
`desc_act` inputs go in the order of their size, largest first, and groups are made in that order.

Suffixes: N outputs, K inputs, S inputs of a block.
"""

import torch

from inference.quantization.grid import Grid, Quantized

_BLOCK = 128  # inputs, at least
DAMPING = 0.01  # of the Hessian's mean diagonal, added to it


def gptq(weight_NK: torch.Tensor, hessian_KK: torch.Tensor, grid: Grid, *, desc_act: bool = False) -> Quantized:
    """`hessian_KK`: the sum of x x^T over tokens x."""
    features = weight_NK.shape[1]
    order_K = torch.arange(features, device=weight_NK.device)
    if desc_act:
        order_K = hessian_KK.diagonal().argsort(descending=True, stable=True)
    w_KN = weight_NK.float().T[order_K].contiguous()
    spread_KK = _spread(hessian_KK[order_K][:, order_K])
    numbers_KN, scales, zeros = torch.empty_like(w_KN), [], []
    block = -(-_BLOCK // grid.group_size) * grid.group_size
    for start in range(0, features, block):
        stop = min(start + block, features)
        errors_SN = torch.empty_like(w_KN[start:stop])
        for k in range(start, stop):
            if k % grid.group_size == 0:
                scale_N, zero_N = grid.fit(w_KN[k : k + grid.group_size].T)
                scales.append(scale_N)
                zeros.append(zero_N)
            numbers_KN[k] = grid.round(w_KN[k], scale_N, zero_N)
            off_N = w_KN[k] - (numbers_KN[k] - zero_N) * scale_N
            errors_SN[k - start] = off_N / spread_KK[k, k]
            w_KN[k:stop].addr_(spread_KK[k, k:stop], errors_SN[k - start], alpha=-1)
        w_KN[stop:].addmm_(spread_KK[start:stop, stop:].T, errors_SN, alpha=-1)
    back_K = order_K.argsort()
    return Quantized(
        numbers_KN[back_K].T.to(torch.uint8), torch.stack(scales), torch.stack(zeros), back_K // grid.group_size
    )


def _spread(hessian_KK: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse, in float32. Inputs that were always 0 stand alone."""
    damped_KK = hessian_KK.double().clone()
    diagonal_K = damped_KK.diagonal()
    diagonal_K[diagonal_K == 0] = 1
    diagonal_K += DAMPING * diagonal_K.mean()
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(damped_KK))
    return torch.linalg.cholesky(inverse_KK, upper=True).float()
