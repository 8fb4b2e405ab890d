"""What is measured: attention against a copy of memory, decode steps against the bandwidth, prefill against the FLOP/s.

Each measurement gives rows (what, figure, goal); a goal is what a good implementation reaches on an H100 or better.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from inference.device_copy import to_device
from inference.device_peak import device_peak
from inference.gpu_check.clock import Work, captured, seconds_of
from inference.gpu_check.random_model import ModelShape, random_decoder, random_step
from inference.kernels.gpu_attention import AttentionStep, Tiles, attend, attention_shape, num_splits
from inference.kernels.gpu_launch import run
from inference.kernels.gpu_sampler import Draw, draw_launches
from inference.model.decoder import Decoder
from inference.model.gpu_decoder import make_tiles
from inference.model.kv_pools import KVPools
from inference.stats import CostModel
from inference.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    value: float
    unit: str
    goal: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        return "" if self.goal is None else "met" if self.value >= self.goal else f"goal {self.goal:g}"


@dataclass(frozen=True, slots=True)
class Bench:
    device: torch.device
    dtype: torch.dtype
    budget: float
    """seconds for one figure"""
    copy_bytes: int

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by a copy far larger than any cache."""
        source = torch.ones(self.copy_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * self.copy_bytes / self.seconds(lambda: target.copy_(source))

    @property
    def num_processors(self) -> int:
        if self.device.type != "cuda":
            return 1
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def seconds(self, work: Work) -> float:
        return seconds_of(work, self.device, budget=self.budget)

    def fits(self, num_bytes: float) -> bool:
        if self.device.type != "cuda":
            return True
        torch.cuda.empty_cache()  # else what was freed counts as taken
        return num_bytes < 0.9 * torch.cuda.mem_get_info(self.device)[0]


@torch.inference_mode()
def attention(
    bench: Bench, copy: float, *, layouts: list[tuple[int, int, int]], loads: list[tuple[int, int]]
) -> Iterator[Row]:
    """`layouts`: query heads, key heads, head size; `loads`: batch, context."""
    for heads, kv_heads, head_dim in layouts:
        for batch, context in loads:
            what = f"attention {heads}/{kv_heads} x {head_dim}, batch {batch}, context {context}"
            blocks = batch * -(-context // 16)
            num_bytes = 2 * blocks * 16 * kv_heads * head_dim * bench.dtype.itemsize
            if not bench.fits(1.2 * num_bytes):
                yield Row(what, float("nan"), "", note="does not fit")
                continue
            splits = num_splits(batch, kv_heads, num_processors=bench.num_processors, window=None)
            work = _attention_work(bench, heads, kv_heads, head_dim, batch, context)
            rate = num_bytes / bench.seconds(captured(work, bench.device))
            goal = 85.0 if context >= 4096 and batch >= 16 else None
            yield Row(what, 100 * rate / copy, "% of copy", goal, f"{rate / 1e9:.0f} GB/s, {splits} splits")


def _attention_work(bench: Bench, heads: int, kv_heads: int, head_dim: int, batch: int, context: int) -> Work:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device, dtype=bench.dtype)

    blocks = batch * -(-context // 16)
    keys, values = (random(blocks, kv_heads, 16, head_dim) for _ in "kv")
    q_TX = random(batch, heads * head_dim)
    table = np.random.default_rng(0).permutation(blocks).reshape(batch, -1)
    ones = np.ones(batch, np.int64)
    positions_T = torch.full((batch,), context - 1, device=bench.device)
    tiles, table_RW = to_device(
        [
            make_tiles(np.arange(batch), ones, np.arange(batch), 1),
            np.pad(table, ((0, 0), (0, -table.shape[1] % 16))),
        ],
        bench.device,
    )
    shape = attention_shape(group=heads // kv_heads, head_dim=head_dim, dtype=bench.dtype, decode=True)
    step = AttentionStep(positions_T, table_RW, (Tiles(tiles, 1, shape),))
    return lambda: attend(
        q_TX,
        keys.transpose(2, 3),
        values,
        step,
        num_heads=heads,
        window=None,
        num_processors=bench.num_processors,
    )


@torch.inference_mode()
def decode(bench: Bench, shape: ModelShape, *, batches: list[int], context: int, goal_at: int) -> Iterator[Row]:
    """A whole decode step, logits and draw included, as a graph."""
    decoder = random_decoder(shape, length=context + 1, dtype=bench.dtype, device=bench.device)
    for batch in batches:
        what = f"decode {shape.name}, batch {batch}, context {context}"
        kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * bench.dtype.itemsize * batch * context
        if not bench.fits(1.2 * kv_bytes + 8 * batch * shape.vocabulary):
            yield Row(what, float("nan"), "", note="does not fit")
            continue
        step, pools = random_step(decoder, [(context, 1)] * batch)
        seconds = bench.seconds(captured(_decode_work(decoder, step, pools), bench.device))
        peak = device_peak(bench.device)
        costs = _costs(decoder)
        moved = costs.body(step)[1] + costs.head(batch)[1]
        goal = 70.0 if batch == goal_at else None
        note = f"{seconds * 1e3:.2f} ms, of {peak.source}"
        yield Row(what, 100 * moved / seconds / peak.bandwidth, "% MBU", goal, note)
        yield Row(what, batch / seconds, "tokens/s")
        del step, pools


@torch.inference_mode()
def graph_gain(bench: Bench, shape: ModelShape, *, context: int) -> Iterator[Row]:
    """How much faster a step is when it is replayed rather than launched kernel by kernel."""
    decoder = random_decoder(shape, length=context + 1, dtype=bench.dtype, device=bench.device)
    work = _decode_work(decoder, *random_step(decoder, [(context, 1)]))
    eager, replayed = bench.seconds(work), bench.seconds(captured(work, bench.device))
    note = f"eager {eager * 1e3:.2f} ms, replayed {replayed * 1e3:.3f} ms"
    yield Row(f"graph over eager, {shape.name}, batch 1", eager / replayed, "times", 3.0, note)


@torch.inference_mode()
def prefill(bench: Bench, shape: ModelShape, *, tokens: int) -> Iterator[Row]:
    decoder = random_decoder(shape, length=tokens, dtype=bench.dtype, device=bench.device)
    step, pools = random_step(decoder, [(0, tokens)])
    seconds = bench.seconds(lambda: decoder.forward(step, pools))
    peak = device_peak(bench.device)
    flops = _costs(decoder).body(step)[0]
    note = f"{tokens / seconds:,.0f} tokens/s, of {peak.source}"
    yield Row(f"prefill {shape.name}, {tokens} tokens", 100 * flops / seconds / peak.flops, "% MFU", note=note)


def _costs(decoder: Decoder) -> CostModel:
    return CostModel(decoder.arch, num_parameters=decoder.num_parameters, element_size=decoder.embedding.element_size())


def _decode_work(decoder: Decoder, step: StepBatch, pools: KVPools) -> Work:
    """From tokens on the device to the drawn ids on the device, at addresses that stay."""
    assert decoder.gpu is not None
    gpu, placed = decoder.gpu, decoder.gpu.place(step)
    rows = len(step.token_ids_T)
    ones, greedy = torch.ones(rows, device=decoder.device), torch.zeros(rows, dtype=torch.int32, device=decoder.device)
    words = torch.arange(2 * rows, dtype=torch.int32, device=decoder.device).view(rows, 2)
    ids = torch.empty(rows, dtype=torch.int64, device=decoder.device)
    draw = Draw(ids, torch.empty((rows, 4), device=decoder.device))

    def work() -> torch.Tensor:
        logits = decoder.logits(gpu.forward_on_device(placed, pools))
        run(draw_launches(logits, None, ones, greedy, words, None, None, draw))
        return ids

    return work
