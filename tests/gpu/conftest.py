"""Triton kernels against their torch twins: on CUDA where it is, else in the interpreter on CPU tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from inference.model.attention import AttentionInput
from inference.model.layers import rope_table
from inference.model.rope import Rope
from inference.step_batch import StepBatch, make_batch

CANARY_BLOCKS = 2  # of the pool, that no table names, before and behind those in use


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    window: int | None = None
    qk_norm: str | None = None
    chunks: tuple[tuple[int, int], ...] = ((0, 1), (14, 1), (15, 1), (16, 1), (299, 1))
    """tokens already there, tokens of this step"""
    transposed: bool = False
    """keys as a pool on a CPU lays them"""

    @property
    def tolerance(self) -> float:
        if self.dtype == torch.float32:
            return 1e-5
        return 2e-2 if torch.cuda.is_available() else 8e-2  # the interpreter cuts off where hardware rounds


class World:
    """Random projections, a pool with NaN wherever nobody may look, and a step over it."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        self.batch, num_blocks = _make_step(case, np.random.default_rng(seed))
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        width = (case.heads + 2 * case.kv_heads) * case.head_dim
        self.qkv_TX = random(len(self.batch.token_ids_T), width)
        size = {None: (0, 0), "head": (1, 1), "whole": (case.heads, case.kv_heads)}[case.qk_norm]
        norms = [random(count * case.head_dim) + 1 if count else None for count in size]
        length = max(start + count for start, count in case.chunks)
        rope = rope_table(Rope(1e4), head_dim=case.head_dim, num_positions=length, device=device)
        self.layer = AttentionInput(
            case.heads, case.kv_heads, case.head_dim, *norms, case.qk_norm, 1e-6, rope, case.window
        )
        shape = (2, num_blocks, case.kv_heads, case.block_size, case.head_dim)
        self.pool = random(*shape)
        live = torch.zeros(num_blocks, case.block_size, dtype=torch.bool, device=device)
        for row, (start, _) in enumerate(case.chunks):
            first = 0 if case.window is None else max(0, start - case.window + 1)
            for position in range(first, start):
                block = self.batch.block_table_RW[row, position // case.block_size]
                live[block, position % case.block_size] = True
        self.pool.masked_fill_(~live[None, :, None, :, None], torch.nan)

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh keys [B, K, D, S] and values [B, K, S, D]."""
        keys, values = self.pool.clone()
        if self.case.transposed:
            return keys.transpose(2, 3).contiguous(), values
        return keys.transpose(2, 3), values


def _make_step(case: Case, rng: np.random.Generator) -> tuple[StepBatch, int]:
    counts = [-(-(start + count) // case.block_size) for start, count in case.chunks]
    blocks = CANARY_BLOCKS + rng.permutation(sum(counts))
    table = np.full((len(counts), -(-max(counts) // 16) * 16), -1, np.int32)
    used = 0
    for row, count in enumerate(counts):
        dead = 0 if case.window is None else max(0, case.chunks[row][0] - case.window + 1) // case.block_size
        table[row, dead:count] = blocks[used + dead : used + count]
        used += count
    positions = [start + i for start, count in case.chunks for i in range(count)]
    rows = [row for row, (_, count) in enumerate(case.chunks) for _ in range(count)]
    ends = np.cumsum([count for _, count in case.chunks]).tolist()
    batch = make_batch([0] * len(rows), positions, rows, ends, table, block_size=case.block_size)
    return batch, used + 2 * CANARY_BLOCKS


@pytest.fixture(scope="session")
def make_case() -> type[Case]:
    return Case


@pytest.fixture(scope="session")
def make_world(device: torch.device) -> Callable[..., World]:
    return lambda case, seed=0: World(case, device, seed)
