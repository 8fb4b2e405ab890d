"""Keys and values in int8 with a float32 scale for each token and head, in torch: what compiled attention reads.

Of a block a head has `block_size` * D numbers (keys [D, S], values [S, D]), then S scales.

Suffixes: B blocks, K key heads, S block size, D head size, X = S * (D + 4) bytes, T tokens, C blocks read.
"""

import torch

from inference.quantization.rows import symmetric

LEVELS = 127
SCALE_BYTES = 4


def store(part_BKX: torch.Tensor, slots_T: torch.Tensor, x_TKD: torch.Tensor, *, keys: bool) -> None:
    numbers_BKSD, scales_BKS = views(part_BKX, x_TKD.shape[2], keys=keys)
    block_size = scales_BKS.shape[2]
    q_RD, scale_R = symmetric(x_TKD.flatten(0, 1), LEVELS)
    block_T, place_T = slots_T // block_size, slots_T % block_size
    numbers_BKSD[block_T, :, place_T] = q_RD.to(torch.int8).view_as(x_TKD)
    scales_BKS[block_T, :, place_T] = scale_R.view(x_TKD.shape[:2])


def gather(part_BKX: torch.Tensor, blocks_C: torch.Tensor, head_dim: int, *, keys: bool) -> torch.Tensor:
    """[K, C * S, D] float32"""
    numbers_CKSD, scales_CKS = views(part_BKX[blocks_C], head_dim, keys=keys)
    return (numbers_CKSD.float() * scales_CKS[..., None]).transpose(0, 1).flatten(1, 2)


def views(part_BKX: torch.Tensor, head_dim: int, *, keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, K, S, D] int8 and [B, K, S] float32, in place"""
    block_size = part_BKX.shape[2] // (head_dim + SCALE_BYTES)
    numbers_BKX, scales_BKX = part_BKX.split([block_size * head_dim, block_size * SCALE_BYTES], dim=2)
    shape = (head_dim, block_size) if keys else (block_size, head_dim)
    numbers = numbers_BKX.unflatten(2, shape)
    return (numbers.transpose(2, 3) if keys else numbers), scales_BKX.view(torch.float32)
