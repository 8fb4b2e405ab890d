"""Norm, rotation, KV write and paged attention against the torch definition, over a pool full of canaries."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from inference.device_copy import to_device
from inference.kernels.gpu_attention import (
    AttentionShape,
    AttentionStep,
    Tiles,
    attend,
    attention_launches,
    attention_shape,
    num_splits,
)
from inference.kernels.gpu_heads import norm_rope_store
from inference.kernels.gpu_launch import run
from inference.model.attention import attend as attend_torch
from inference.model.gpu_decoder import make_tiles

LAYOUTS = [(9, 3), (32, 8), (14, 2), (16, 16)]
PREFILL = ((0, 18), (15, 2), (16, 1), (0, 1), (66, 5))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# heads, head size, dtype, window, splits, prefill, norm: each value of each column, no two rows alike
SLICE = [
    ((9, 3), 64, "fp32", None, 1, False, None),
    ((9, 3), 96, "bf16", 20, 4, False, "head"),
    ((32, 8), 128, "bf16", None, 4, False, None),
    ((32, 8), 64, "fp32", 100, 2, False, "whole"),
    ((14, 2), 64, "fp32", None, 1, True, None),
    ((14, 2), 128, "fp32", 20, 1, True, "head"),
    ((16, 16), 96, "fp32", None, 4, False, "whole"),
    ((16, 16), 128, "bf16", 33, 1, False, "whole"),
    ((9, 3), 64, "bf16", 17, 2, True, None),
]
FULL = [
    (layout, dim, dtype, window, splits, prefill, ("head", "whole", None)[number % 3])
    for number, (layout, dim, dtype, window, splits, prefill) in enumerate(
        product(LAYOUTS, (64, 96, 128), DTYPES, (None, 1, 24), (1, 4), (False, True))
    )
]


def run_kernels(
    world: Any, splits: int, shape: AttentionShape | None = None, pad: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, keys, values), with `pad` padded rows behind the step."""
    case, batch = world.case, world.batch
    counts = np.diff(batch.chunk_ends_C, prepend=0)
    starts = batch.chunk_ends_C - counts
    group = case.heads // case.kv_heads
    shape = shape or attention_shape(
        group=group, head_dim=case.head_dim, dtype=case.dtype, decode=bool((counts == 1).all())
    )
    per_tile = min(shape.block_m // group, int(counts.max()))
    tiles = make_tiles(starts, counts, batch.rows_T[starts], per_tile)
    padding = np.array([[len(batch.positions_T) + i, 1, 0] for i in range(pad)], np.int64).reshape(-1, 3)
    positions, slots = (
        torch.from_numpy(np.concatenate([array, np.full(pad, -1)])).to(world.device)
        for array in (batch.positions_T, batch.slots_T)
    )
    tiles_N3, table = to_device([np.concatenate([tiles, padding]), batch.block_table_RW], world.device)
    qkv_TX = torch.cat([world.qkv_TX, torch.full_like(world.qkv_TX[:1], torch.nan).expand(pad, -1)])
    keys, values = world.pools()
    norm_rope_store(
        qkv_TX, world.layer.q_norm, world.layer.k_norm, world.layer.rope_2PF, positions, slots, keys, values,
        num_heads=case.heads, qk_norm=case.qk_norm, eps=world.layer.norm_eps,
    )  # fmt: skip
    part = Tiles(tiles_N3, per_tile, shape)
    out = torch.full((len(qkv_TX), case.heads * case.head_dim), torch.nan, dtype=case.dtype, device=world.device)
    run(
        attention_launches(
            qkv_TX, keys, values, AttentionStep(positions, table, (part,)), part, out,
            num_heads=case.heads, window=case.window, splits=splits,
        )
    )  # fmt: skip
    return out, keys, values


def assert_equals_torch(world: Any, found: tuple[torch.Tensor, ...]) -> None:
    """Torch weighs what it must not see with 0, and so meets zeros where the kernels' pool is NaN."""
    slots_T = torch.from_numpy(world.batch.slots_T).to(world.device)
    before = world.pools()
    keys, values = (part.nan_to_num() for part in before)
    expected = attend_torch(world.qkv_TX.clone(), world.layer, keys, values, world.batch)
    tolerance = world.case.tolerance
    torch.testing.assert_close(found[0][: len(expected)], expected, atol=tolerance, rtol=tolerance)
    # The whole pool: what the step did not write is NaN still, or what it was.
    size = world.case.block_size
    written = torch.zeros(len(keys), size, dtype=torch.bool, device=world.device)
    written[slots_T // size, slots_T % size] = True
    masks = written[:, None, None, :], written[:, None, :, None]
    for ours, theirs, old, mask in zip(found[1:], (keys, values), before, masks, strict=True):
        theirs = torch.where(mask, theirs, old)
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, equal_nan=True)
        assert ours[:2].isnan().all() and ours[-2:].isnan().all()


def check(make_case: Any, make_world: Any, row: tuple[Any, ...], **more: Any) -> None:
    (heads, kv_heads), head_dim, dtype, window, splits, prefill, qk_norm = row
    chunks = {"chunks": PREFILL} if prefill else {}
    case = make_case(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=DTYPES[dtype], window=window, qk_norm=qk_norm,
        **chunks, **more,
    )  # fmt: skip
    world = make_world(case)
    assert_equals_torch(world, run_kernels(world, splits))


@pytest.mark.parametrize("row", SLICE, ids=str)
def test_equals_torch(make_case: Any, make_world: Any, row: tuple[Any, ...]) -> None:
    check(make_case, make_world, row)


@pytest.mark.soak
@pytest.mark.parametrize("row", FULL, ids=str)
def test_equals_torch_everywhere(make_case: Any, make_world: Any, row: tuple[Any, ...]) -> None:
    check(make_case, make_world, row)


@pytest.mark.parametrize(("block_size", "transposed"), [(1, False), (5, True), (32, False), (128, True)])
def test_any_block_size_and_layout(make_case: Any, make_world: Any, block_size: int, transposed: bool) -> None:
    row = ((4, 2), 16, "fp32", 40, 2, False, None)
    check(make_case, make_world, row, block_size=block_size, transposed=transposed)


@pytest.mark.parametrize("splits", [1, 4])
def test_padded_rows_write_nothing_and_give_zeros(make_case: Any, make_world: Any, splits: int) -> None:
    world = make_world(make_case(head_dim=16, chunks=((0, 1), (31, 1))))
    found = run_kernels(world, splits, pad=3)
    assert_equals_torch(world, found)
    assert (found[0][2:] == 0).all()


def test_a_step_without_tokens_is_no_launch(make_case: Any, device: torch.device) -> None:
    case = make_case()
    keys = torch.full((3, case.kv_heads, case.head_dim, 16), torch.nan, device=device)
    values = keys.transpose(2, 3).contiguous()
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    shape = attention_shape(group=2, head_dim=64, dtype=torch.float32, decode=True)
    step = AttentionStep(empty, empty.view(0, 1), (Tiles(empty.view(0, 3), 1, shape),))
    qkv = torch.zeros((0, 8 * case.head_dim), device=device)
    assert attend(qkv, keys, values, step, num_heads=4, window=None, num_processors=8).shape == (0, 256)


def test_without_split_a_token_is_bitwise_the_same_in_any_step(make_case: Any, make_world: Any) -> None:
    """Alone as the last token of a cached context, or in the middle of a chunk: one order of sums."""
    shape = AttentionShape(16, 32, 4, 1)
    chunk = make_world(make_case(head_dim=32, window=50, chunks=((0, 9), (90, 7))))
    together, keys, values = run_kernels(chunk, 1, shape)
    alone = make_world(make_case(head_dim=32, window=50, chunks=((96, 1),)))
    alone.qkv_TX = chunk.qkv_TX[-1:]
    tables = chunk.batch.block_table_RW[1:], alone.batch.block_table_RW
    first = (96 - 49) // 16
    for pool, ours in zip(alone.pool, (keys.transpose(2, 3), values), strict=True):
        for block in range(first, 7):
            pool[tables[1][0, block]] = ours[tables[0][0, block]]
    found = run_kernels(alone, 1, shape)[0][0]
    if found.is_cuda:
        assert torch.equal(found, together[-1])
    else:  # the interpreter's products are numpy's, whose rounding depends on the row
        torch.testing.assert_close(found, together[-1], atol=2e-7, rtol=1e-6)


def test_splits_follow_the_shape_of_the_batch_alone() -> None:
    def splits(tiles: int, window: int | None = None) -> int:
        return num_splits(tiles, 8, num_processors=132, window=window)

    assert [splits(tiles) for tiles in (1, 16, 64, 256)] == [32, 8, 2, 1]
    assert splits(1, window=512) == 2
    assert num_splits(1, 8, num_processors=0, window=None) == 1


def test_tiles_cover_each_token_once() -> None:
    counts = np.array([1, 5, 16, 7])
    tiles = make_tiles(np.cumsum(counts) - counts, counts, np.arange(4), 5)
    covered = [(first + i, chunk) for first, count, chunk in tiles.tolist() for i in range(count)]
    assert covered == [(token, chunk) for token, chunk in enumerate(np.repeat(np.arange(4), counts).tolist())]


def test_the_parts_of_a_split_take_memory_by_their_tiles_not_by_the_step() -> None:
    """One token that decodes beside a prompt of 8192: by the step, its 32 splits would take four gigabytes a layer."""

    def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    tokens, heads, kv_heads, head_dim, splits = 8193, 32, 8, 128, 32
    shape = attention_shape(group=heads // kv_heads, head_dim=head_dim, dtype=torch.bfloat16, decode=True)
    part = Tiles(meta(1, 3, dtype=torch.int32), 1, shape)
    step = AttentionStep(meta(tokens, dtype=torch.int64), meta(2, 1024, dtype=torch.int32), (part,))
    keys, values = (meta(1024, kv_heads, 16, head_dim) for _ in "kv")
    _, merge = attention_launches(
        meta(tokens, (heads + 2 * kv_heads) * head_dim), keys.transpose(2, 3), values, step, part,
        meta(tokens, heads * head_dim), num_heads=heads, window=None, splits=splits,
    )  # fmt: skip
    partial = sum(t.nbytes for t in merge.arguments if isinstance(t, torch.Tensor) and t.dtype == torch.float32)
    assert partial <= splits * kv_heads * shape.block_m * (head_dim + 2) * 4
