"""The compiled attention against its torch twin, over head layouts, norms, windows, chunkings and block sizes."""

import numpy as np
import pytest
import torch

from inference.model.architecture import Rope
from inference.model.attention import AttentionInput, attend_compiled, attend_torch
from inference.model.layers import rope_table
from inference.step_batch import StepBatch, make_batch

CHUNKS = [(0, 13), (5, 1), (40, 1), (15, 2), (16, 1), (31, 3)]  # (tokens already there, tokens of this step)


def make_step(block_size: int, rng: np.random.Generator) -> tuple[StepBatch, int]:
    counts = [-(-(start + count) // block_size) for start, count in CHUNKS]
    table = np.zeros((len(CHUNKS), max(counts)), np.int32)
    blocks = rng.permutation(sum(counts) + 3)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = blocks[used : used + count]
        used += count
    positions = [start + i for start, count in CHUNKS for i in range(count)]
    rows = [row for row, (_, count) in enumerate(CHUNKS) for _ in range(count)]
    ends = np.cumsum([count for _, count in CHUNKS]).tolist()
    return make_batch([0] * len(rows), positions, rows, ends, table, block_size=block_size), sum(counts) + 3


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (14, 2, 32), (2, 1, 96)])
@pytest.mark.parametrize("qk_norm", [None, "head", "whole"])
@pytest.mark.parametrize(("block_size", "window"), [(1, None), (4, 7), (16, None), (16, 16)])
def test_compiled_equals_torch(
    heads: int, kv_heads: int, head_dim: int, qk_norm: str | None, block_size: int, window: int | None
) -> None:
    rng = np.random.default_rng(0)
    batch, num_blocks = make_step(block_size, rng)
    widths = {None: (0, 0), "head": (head_dim, head_dim), "whole": (heads * head_dim, kv_heads * head_dim)}[qk_norm]
    norms = [torch.rand(width) + 0.5 if width else None for width in widths]
    rope = rope_table(Rope(1e4), head_dim=head_dim, num_positions=64, device=torch.device("cpu"))
    layer = AttentionInput(heads, kv_heads, head_dim, norms[0], norms[1], qk_norm, 1e-6, rope, window)
    qkv = torch.randn(len(batch.rows_T), (heads + 2 * kv_heads) * head_dim) * 2
    results = []
    pool = torch.randn(2, num_blocks, kv_heads, block_size, head_dim)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    written.view(-1)[torch.from_numpy(batch.slots_T)] = True
    for row, (start, _) in enumerate(CHUNKS):
        for position in range(start):
            written[batch.block_table_RW[row, position // block_size], position % block_size] = True
    pool[:, ~written[:, None, :].expand(-1, kv_heads, -1)] = torch.nan  # whatever is read without being live shows
    for attend in (attend_compiled, attend_torch):
        keys, values = pool.clone()
        out = attend(qkv.clone(), layer, keys, values, batch)
        results.append((out, keys, values))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert torch.isfinite(results[0][0]).all()


@pytest.mark.parametrize("part", [slice(0, 32), slice(32, 48), slice(48, 64)], ids=["query", "key", "value"])
def test_nan_in_one_sequence_shows_and_stays_there(part: slice) -> None:
    rng = np.random.default_rng(0)
    batch, num_blocks = make_step(4, rng)
    rope = rope_table(Rope(1e4), head_dim=16, num_positions=64, device=torch.device("cpu"))
    layer = AttentionInput(2, 1, 16, None, None, None, 1e-6, rope, None)
    qkv = torch.randn(len(batch.rows_T), 64)
    qkv[13, part] = torch.nan  # the single token of chunk 1
    keys, values = torch.randn(2, num_blocks, 1, 4, 16)
    out = attend_compiled(qkv, layer, keys, values, batch)
    assert torch.isnan(out).any(-1).nonzero()[:, 0].tolist() == [13]
