"""Norm and rotation of queries and keys, and the write of keys and values to their slots, in one pass over a step.

Two programs a token: one for the queries, which stay in place, one for keys and values. A slot below 0 is a padded
row and writes nothing: as an index, -1 would silently hit the last slot of the pool.

Twin: the first half of `inference.model.attention.attend`, rounding for rounding.

Suffixes: T tokens, X features of a row, P positions, F half of a head, B blocks, K key heads, D head size, S block
size, H heads.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from inference.kernels.gpu_launch import Launch, run

NORMS = {None: 0, "head": 1, "whole": 2}


def norm_rope_store(
    qkv_TX: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    rope_2PF: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    keys_BKDS: torch.Tensor,
    values_BKSD: torch.Tensor,
    *,
    num_heads: int,
    qk_norm: str | None,
    eps: float,
) -> None:
    """Queries in place, keys and values to the pool. `positions_T` and `slots_T` are int64."""
    run(
        [
            heads_launch(
                qkv_TX, q_norm, k_norm, rope_2PF, positions_T, slots_T, keys_BKDS, values_BKSD,
                num_heads=num_heads, qk_norm=qk_norm, eps=eps,
            )
        ]
    )  # fmt: skip


def heads_launch(
    qkv_TX: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    rope_2PF: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    keys_BKDS: torch.Tensor,
    values_BKSD: torch.Tensor,
    *,
    num_heads: int,
    qk_norm: str | None,
    eps: float,
) -> Launch:
    _, num_kv_heads, head_dim, block_size = keys_BKDS.shape
    assert qkv_TX.stride(1) == 1 and values_BKSD.stride(3) == 1 and rope_2PF.is_contiguous()
    padded = triton.next_power_of_2(num_heads) * triton.next_power_of_2(head_dim)
    return Launch(
        _norm_rope_store,
        (len(qkv_TX), 2),
        (
            qkv_TX, qkv_TX if q_norm is None else q_norm, qkv_TX if k_norm is None else k_norm, rope_2PF,
            positions_T, slots_T, keys_BKDS, values_BKSD, qkv_TX.stride(0), rope_2PF.stride(0),
            *keys_BKDS.stride(), *values_BKSD.stride()[:3], eps,
        ),
        {
            "NUM_HEADS": num_heads,
            "NUM_KV": num_kv_heads,
            "Q_HEADS": triton.next_power_of_2(num_heads),
            "KV_HEADS": triton.next_power_of_2(num_kv_heads),
            "HALF": head_dim // 2,
            "PADDED_HALF": triton.next_power_of_2(head_dim // 2),
            "BLOCK_SIZE": block_size,
            "NORM": NORMS[qk_norm],
        },
        {"num_warps": 8 if padded > 2048 else 4, "num_stages": 1},
    )  # fmt: skip


@triton.jit
def _normalized(x, weight, count, eps, NORM: tl.constexpr):
    """[H, F] halves of heads as float32, rounded where transformers rounds. `x` and `weight` are pairs of tiles."""
    low, high = x
    if NORM > 0:
        dtype = low.dtype
        low, high = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if NORM == 2:
            scale = tl.rsqrt(tl.sum(squares, 0) / count + eps)
            low, high = low * scale, high * scale
        else:
            scale = tl.rsqrt(squares / count + eps)
            low, high = low * scale[:, None], high * scale[:, None]
        low = (weight[0].to(tl.float32) * low.to(dtype).to(tl.float32)).to(dtype)
        high = (weight[1].to(tl.float32) * high.to(dtype).to(tl.float32)).to(dtype)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _heads(
    at,
    norm,
    cos,
    sin,
    eps,
    NUM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normalised and rotated [H, F] halves, their offsets from the first head, and which are there."""
    h = tl.arange(0, HEADS)
    f = tl.arange(0, PADDED_HALF)
    offset = h[:, None] * (2 * HALF) + f[None, :]
    there = (h < NUM)[:, None] & (f < HALF)[None, :]
    low = tl.load(at + offset, mask=there, other=0.0)
    high = tl.load(at + offset + HALF, mask=there, other=0.0)
    if NORM == 2:
        weight = (
            tl.load(norm + offset, mask=there, other=0.0),
            tl.load(norm + offset + HALF, mask=there, other=0.0),
        )
        low, high = _normalized((low, high), weight, NUM * 2 * HALF, eps, NORM)
    elif NORM == 1:
        weight = (
            tl.load(norm + f, mask=f < HALF, other=0.0)[None, :],
            tl.load(norm + HALF + f, mask=f < HALF, other=0.0)[None, :],
        )
        low, high = _normalized((low, high), weight, 2 * HALF, eps, NORM)
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)
    turned_low = low * cos[None, :] - high * sin[None, :]
    turned_high = high * cos[None, :] + low * sin[None, :]
    return turned_low, turned_high, offset, there


@triton.jit
def _turn_queries(
    at, norm, cos, sin, eps,
    NUM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    low, high, offset, there = _heads(at, norm, cos, sin, eps, NUM, HEADS, HALF, PADDED_HALF, NORM)
    tl.store(at + offset, low.to(at.dtype.element_ty), mask=there)
    tl.store(at + offset + HALF, high.to(at.dtype.element_ty), mask=there)


@triton.jit
def _store_keys(
    at, norm, cos, sin, eps, wanted, key_at, key_head, key_dim,
    NUM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    low, high, _, there = _heads(at, norm, cos, sin, eps, NUM, HEADS, HALF, PADDED_HALF, NORM)
    h = tl.arange(0, HEADS).to(tl.int64)
    f = tl.arange(0, PADDED_HALF)
    key_at = key_at + h[:, None] * key_head
    tl.store(key_at + f[None, :] * key_dim, low.to(at.dtype.element_ty), mask=there & wanted)
    tl.store(key_at + (f[None, :] + HALF) * key_dim, high.to(at.dtype.element_ty), mask=there & wanted)


@triton.jit
def _store_values(
    at, wanted, value_at, value_head,
    NUM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, HEADS)
    d = tl.arange(0, 2 * PADDED_HALF)
    there = (h < NUM)[:, None] & (d < 2 * HALF)[None, :] & wanted
    value = tl.load(at + h[:, None] * (2 * HALF) + d[None, :], mask=there)
    tl.store(value_at + h.to(tl.int64)[:, None] * value_head + d[None, :], value, mask=there)


@triton.jit
def _norm_rope_store(
    qkv,
    q_norm,
    k_norm,
    rope,
    positions,
    slots,
    keys,
    values,
    qkv_step,
    sines,
    key_block,
    key_head,
    key_dim,
    key_slot,
    value_block,
    value_head,
    value_slot,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.maximum(tl.load(positions + token), 0).to(tl.int64)
    f = tl.arange(0, PADDED_HALF)
    cos = tl.load(rope + position * HALF + f, mask=f < HALF, other=0.0)
    sin = tl.load(rope + sines + position * HALF + f, mask=f < HALF, other=0.0)
    at = qkv + token * qkv_step
    if tl.program_id(1) == 0:
        _turn_queries(at, q_norm, cos, sin, eps, NUM_HEADS, Q_HEADS, HALF, PADDED_HALF, NORM)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        _store_keys(
            at + NUM_HEADS * 2 * HALF, k_norm, cos, sin, eps, slot >= 0,
            keys + block * key_block + place * key_slot, key_head, key_dim, NUM_KV, KV_HEADS, HALF, PADDED_HALF, NORM,
        )  # fmt: skip
        _store_values(
            at + (NUM_HEADS + NUM_KV) * 2 * HALF, slot >= 0,
            values + block * value_block + place * value_slot, value_head, NUM_KV, KV_HEADS, HALF, PADDED_HALF,
        )  # fmt: skip
