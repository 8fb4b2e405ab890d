"""Paged attention for prefill and decode in one kernel.

All query heads that share a key head lie in the rows of one matrix tile (row = token * group + head), so a key is
read once for them and the tile reaches the width of the matrix units. A program walks the keys of a chunk through its
block table. Where there are few programs, keys are split among several, whose parts are merged by log-sum-exp; how
many depends on the shape of the batch alone, so that a captured graph stays valid while contexts grow. Without split
and at one tile shape, a token's sums have one order whatever else is in the step.

Twin: `inference.model.attention.attend`.

Suffixes: T tokens, N tiles of tokens, R rows of the block table, W its width, X features of a row, B blocks, K key
heads, D head size, S block size.
"""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inference.kernels.gpu_launch import Launch, interpreted, run

_KEYS_PER_SPLIT = 256  # at least: a shorter part costs more to merge than it saves
_MAX_SPLITS = 32
_WAVES = 4  # programs wanted for each multiprocessor; two fit at once


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How the kernel is cut. `block_m` rows of queries, `tile` keys at once."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens of a step that are computed by one shape of the kernel."""

    tiles_N3: torch.Tensor
    """int32: first token, number of tokens (of one chunk), row of the block table"""
    tokens_per_tile: int
    """the most tokens that a tile holds"""
    shape: AttentionShape


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Where the tokens of a step stand, on the device."""

    positions_T: torch.Tensor
    """int64; -1 is a padded row: it sees nothing, and zeros come out"""
    table_RW: torch.Tensor
    """int32"""
    parts: tuple[Tiles, ...]
    """each token in one of them: single tokens apart from longer chunks, for other tiles suit them"""


def attention_shape(*, group: int, head_dim: int, dtype: torch.dtype, decode: bool) -> AttentionShape:
    """`decode`: single tokens, whose queries fill one row of matrix units. Shapes that keep all values in registers."""
    block_m = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:  # computed without tensor cores, for tests and debugging
        return AttentionShape(block_m, 32, 8, 1)
    if not decode:
        return AttentionShape(max(64, block_m), 64, 8, 3)
    return AttentionShape(block_m, 64, 4, 3) if head_dim <= 64 else AttentionShape(block_m, 32, 4, 4)


def num_splits(num_tiles: int, num_kv_heads: int, *, num_processors: int, window: int | None) -> int:
    """A power of two. Looks at the shape of the batch only, never at its contexts."""
    wanted = -(-_WAVES * num_processors // max(1, num_tiles * num_kv_heads))
    if window is not None:
        wanted = min(wanted, -(-window // _KEYS_PER_SPLIT))
    return min(_MAX_SPLITS, triton.next_power_of_2(max(1, wanted)))


def attend(
    q_TX: torch.Tensor,
    keys_BKDS: torch.Tensor,
    values_BKSD: torch.Tensor,
    step: AttentionStep,
    *,
    num_heads: int,
    window: int | None,
    num_processors: int,
) -> torch.Tensor:
    """[T, num_heads * D]. Queries are the first features of each row; keys and values may have any strides.

    `num_processors` of the GPU decide how far keys are split; 0 splits nothing.
    """
    out_TX = torch.empty((len(q_TX), num_heads * keys_BKDS.shape[2]), dtype=q_TX.dtype, device=q_TX.device)
    for part in step.parts:
        splits = num_splits(len(part.tiles_N3), keys_BKDS.shape[1], num_processors=num_processors, window=window)
        launches = attention_launches(
            q_TX, keys_BKDS, values_BKSD, step, part, out_TX, num_heads=num_heads, window=window, splits=splits
        )
        run(launches)
    return out_TX


def attention_launches(
    q_TX: torch.Tensor,
    keys_BKDS: torch.Tensor,
    values_BKSD: torch.Tensor,
    step: AttentionStep,
    part: Tiles,
    out_TX: torch.Tensor,
    *,
    num_heads: int,
    window: int | None,
    splits: int,
) -> list[Launch]:
    _, num_kv_heads, head_dim, block_size = keys_BKDS.shape
    group = num_heads // num_kv_heads
    num_tiles, shape = len(part.tiles_N3), part.shape
    assert part.tokens_per_tile * group <= shape.block_m, (part.tokens_per_tile, group, shape)
    assert values_BKSD.stride(3) == 1 and q_TX.stride(1) == 1 and out_TX.is_contiguous()
    parts, sums = out_TX, out_TX
    if splits > 1:
        rows = splits * num_tiles * num_kv_heads * shape.block_m
        parts = torch.empty((rows, head_dim), dtype=torch.float32, device=q_TX.device)
        sums = torch.empty((rows, 2), dtype=torch.float32, device=q_TX.device)
    common = {
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "TILE": shape.tile,
        "WINDOW": window or 0,
        "SPLITS": splits,
        "TILES_PER_SPLIT": max(1, _KEYS_PER_SPLIT // shape.tile),
    }
    launches = [
        Launch(
            _attend,
            (num_tiles, num_kv_heads, splits),
            (
                q_TX, keys_BKDS, values_BKSD, step.positions_T, part.tiles_N3, step.table_RW, out_TX, parts, sums,
                q_TX.stride(0), step.table_RW.stride(0), *keys_BKDS.stride(), *values_BKSD.stride()[:3],
                head_dim**-0.5 * 1.4426950408889634,
            ),
            {**common, "BLOCK_SIZE": block_size, "WIDEN": interpreted()},
            {"num_warps": shape.num_warps, "num_stages": shape.num_stages},
        )
    ]  # fmt: skip
    if splits > 1:
        launches.append(
            Launch(
                _merge,
                (num_tiles, num_kv_heads, part.tokens_per_tile * group),
                (step.positions_T, part.tiles_N3, out_TX, parts, sums),
                common,
                {"num_warps": 4, "num_stages": 1},
            )
        )
    return launches


@triton.jit
def _tile_range(
    position, count, split, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr
):
    """First and last tile of keys that a split of a tile of tokens sees, cut at multiples of TILE."""
    end = position + count
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE
    last = tl.cdiv(end, TILE)
    if SPLITS > 1:
        part = tl.maximum(tl.cdiv(last - first, SPLITS), LEAST)
        first = first + split * part
        last = tl.minimum(first + part, last)
    return first, last


@triton.jit
def _part_row(split, tile, kv_head, BLOCK_M: tl.constexpr):
    """Where the rows of a split of a tile begin among all parts."""
    return ((split.to(tl.int64) * tl.num_programs(0) + tile) * tl.num_programs(1) + kv_head) * BLOCK_M


@triton.jit
def _product(a, b, acc, WIDEN: tl.constexpr):
    """acc + a b in float32. The interpreter would multiply the bits of bfloat16: there it is widened first."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


# What changes from step to step is not specialised: each variant would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["table_step"])
def _attend(
    q,
    keys,
    values,
    positions,
    tiles,
    table,
    out,
    parts,
    sums,
    q_step,
    table_step,
    key_block,
    key_head,
    key_dim,
    key_slot,
    value_block,
    value_head,
    value_slot,
    scale,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """`scale` turns products into exponents of two."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    first_token = tl.load(tiles + 3 * tile).to(tl.int64)
    count = tl.load(tiles + 3 * tile + 1)
    row = tl.load(tiles + 3 * tile + 2).to(tl.int64)
    position = tl.load(positions + first_token).to(tl.int32)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED_DIM)
    token = m // GROUP
    q_head = kv_head * GROUP + m % GROUP
    live = token < count
    in_head = d < HEAD_DIM
    q_rows = (first_token + token) * q_step + q_head * HEAD_DIM
    q_MD = tl.load(q + q_rows[:, None] + d[None, :], mask=live[:, None] & in_head[None, :], other=0.0)

    q_position = position + token
    end = position + count
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0)
    first, last = _tile_range(position, count, split, TILE, WINDOW, SPLITS, TILES_PER_SPLIT)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    keys_at = keys + kv_head.to(tl.int64) * key_head
    values_at = values + kv_head.to(tl.int64) * value_head
    table_at = table + row * table_step
    n = first * TILE + tl.arange(0, TILE)
    following = tl.load(table_at + n // BLOCK_SIZE, mask=(n >= begin) & (n < end), other=0)
    for index in range(first, last):
        n = index * TILE + tl.arange(0, TILE)
        there = (n >= begin) & (n < end)
        block = following.to(tl.int64)
        # Carried from turn to turn: in the same turn the keys would wait for it, and could not be fetched ahead.
        following = tl.load(table_at + (n + TILE) // BLOCK_SIZE, mask=n + TILE < end, other=0)
        key_rows = block * key_block + (n % BLOCK_SIZE) * key_slot
        k_DN = tl.load(
            keys_at + key_rows[None, :] + d[:, None] * key_dim, mask=there[None, :] & in_head[:, None], other=0.0
        )
        value_rows = block * value_block + (n % BLOCK_SIZE) * value_slot
        v_ND = tl.load(values_at + value_rows[:, None] + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        score = _product(q_MD, k_DN, tl.zeros([BLOCK_M, TILE], tl.float32), WIDEN) * scale
        seen = (n[None, :] <= q_position[:, None]) & live[:, None]
        if WINDOW > 0:
            seen = seen & (n[None, :] > q_position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - finite[:, None])
        fade = tl.exp2(top - finite)
        total = total * fade + tl.sum(weight, 1)
        acc = _product(weight.to(v_ND.dtype), v_ND, acc * fade[:, None], WIDEN)
        top = higher

    stored = live[:, None] & in_head[None, :]
    num_heads = num_kv_heads * GROUP
    if SPLITS == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_rows = ((first_token + token) * num_heads + q_head) * HEAD_DIM
        tl.store(out + out_rows[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        part_rows = _part_row(split, tile, kv_head, BLOCK_M) + m
        used = first < last
        tl.store(parts + (part_rows * HEAD_DIM)[:, None] + d[None, :], acc, mask=stored & used)
        tl.store(sums + 2 * part_rows, top, mask=live & used)
        tl.store(sums + 2 * part_rows + 1, total, mask=live & used)


@triton.jit
def _merge(
    positions,
    tiles,
    out,
    parts,
    sums,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
):
    """One row of one tile: the parts of its splits in their order."""
    tile, kv_head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(tiles + 3 * tile).to(tl.int64)
    count = tl.load(tiles + 3 * tile + 1)
    position = tl.load(positions + first_token).to(tl.int32)
    num_heads = tl.num_programs(1) * GROUP
    d = tl.arange(0, PADDED_DIM)
    split = tl.arange(0, SPLITS)
    first, last = _tile_range(position, count, split, TILE, WINDOW, SPLITS, TILES_PER_SPLIT)
    live = m // GROUP < count
    used = (first < last) & live
    row = (first_token + m // GROUP) * num_heads + kv_head * GROUP + m % GROUP
    part_rows = _part_row(split, tile, kv_head, BLOCK_M) + m
    top_S = tl.load(sums + 2 * part_rows, mask=used, other=float("-inf"))
    total_S = tl.load(sums + 2 * part_rows + 1, mask=used, other=0.0)
    part_SD = tl.load(
        parts + (part_rows * HEAD_DIM)[:, None] + d[None, :], mask=used[:, None] & (d < HEAD_DIM)[None, :], other=0.0
    )
    top = tl.max(top_S, 0)
    share_S = tl.exp2(top_S - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(share_S * total_S, 0)
    result = tl.sum(share_S[:, None] * part_SD, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=(d < HEAD_DIM) & live)
