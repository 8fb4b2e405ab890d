"""Decode steps from static buffers. Without a GPU a replay is the same call on the same buffers, so what is tested is
all but the recording itself: which size is taken, what lies in the buffers, and that padding reaches nothing.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Olmo3Config, Olmo3ForCausalLM

from inference import LLM, SamplingParams
from inference.cuda_graphs import DecodeGraphs, Replay, batch_sizes
from inference.model.step_tensors import moved
from inference.step_batch import StepBatch, make_batch

PROMPTS = [[1, 10, 2, 11], [3, 10, 4, 10, 5, 11], [9] * 17, [0], [5, 5, 7], [2] * 9, [12], [13, 1]]
CPU = torch.device("cpu")


@given(st.integers(1, 2000))
def test_every_batch_has_a_size_close_above_it(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for count in range(1, largest + 1):
        padding = min(size for size in sizes if size >= count) - count
        assert padding < (16 if count > 256 else 8) and (count > 2 or padding == 0)


def step(count: int, *, block_size: int, seed: int) -> StepBatch:
    """`count` decodes, on rows in some order, with block tables full of numbers."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 90, (20, 6), generator=random, dtype=torch.int32).numpy()
    rows = torch.randperm(20, generator=random)[:count].tolist()
    positions = torch.randint(0, 5 * block_size, (count,), generator=random).tolist()
    tokens = torch.randint(1, 50, (count,), generator=random).tolist()
    return make_batch(tokens, positions, rows, list(range(1, count + 1)), table, block_size=block_size)


def test_buffers_hold_the_step_and_behind_it_rows_of_the_null_block_alone() -> None:
    seen: list[StepBatch] = []

    def forward(batch: StepBatch) -> torch.Tensor:
        seen.append(batch)
        assert batch.tensors is not None
        return batch.tensors.token_ids_T * 2

    graphs = DecodeGraphs(
        forward,
        max_num_seqs=20,
        max_blocks=5,
        block_size=4,
        null_block=99,
        null_window_block=None,
        device=CPU,
    )
    assert graphs.sizes == [1, 2, 4, 8, 16, 20] and not seen, "without a capture nothing runs ahead"
    for seed, (count, size) in enumerate([(20, 20), (3, 4), (17, 20), (1, 1), (9, 16), (2, 2), (5, 8)]):
        batch = moved(step(count, block_size=4, seed=seed), CPU)
        assert graphs.fits(batch)
        assert graphs.run(batch).tolist() == (batch.token_ids_T * 2).tolist()
        static = seen[-1]
        assert static.token_ids_T.tolist() == [*batch.token_ids_T, *[0] * (size - count)]
        assert static.positions_T.tolist() == [*batch.positions_T, *[0] * (size - count)]
        assert static.slots_T.tolist() == [*batch.slots_T, *[99 * 4] * (size - count)]
        assert static.chunk_ends_C.tolist() == list(range(1, size + 1))
        assert (static.block_table_RW[:count] == batch.block_table_RW[batch.rows_T, :5]).all()
        assert (static.block_table_RW[static.rows_T[count:], 0] == 99).all()
    assert len({id(batch) for batch in seen}) == len({len(b.token_ids_T) for b in seen}), "one static batch a size"
    prefill = make_batch([1, 2], [0, 1], [0, 0], [2], batch.block_table_RW, block_size=4)
    assert not graphs.fits(prefill)


def test_each_size_is_captured_once_the_largest_first() -> None:
    captured: list[Replay] = []
    replayed: list[int] = []

    def capture(run: Replay) -> Replay:
        number = len(captured)
        captured.append(run)
        run()

        def replay() -> torch.Tensor:
            replayed.append(number)
            return run()

        return replay

    sizes: list[int] = []

    def forward(batch: StepBatch) -> torch.Tensor:
        assert batch.tensors is not None
        sizes.append(len(batch.tensors.token_ids_T))
        assert (batch.tensors.slots_T == 36).all() or replayed, "a capture touches the null block alone"
        return batch.tensors.token_ids_T

    graphs = DecodeGraphs(
        forward, max_num_seqs=9, max_blocks=5, block_size=4, null_block=9, null_window_block=None, device=CPU,
        capture=capture,
    )  # fmt: skip
    assert sizes == [9, 8, 4, 2, 1] == list(reversed(graphs.sizes))
    for count in (1, 3, 9, 3, 5):
        graphs.run(moved(step(count, block_size=4, seed=count), CPU))
    assert replayed == [4, 2, 0, 2, 1] and len(captured) == 5


def test_buffers_that_the_host_cannot_read_still_say_what_the_batch_is() -> None:
    """As on a GPU: the device here has no memory at all."""
    seen: list[StepBatch] = []

    def capture(run: Replay) -> Replay:
        run()
        return run

    def forward(batch: StepBatch) -> torch.Tensor:
        seen.append(batch)
        assert batch.tensors is not None and batch.windowed is not None and batch.windowed.tensors is not None
        return batch.tensors.token_ids_T

    meta = torch.device("meta")
    DecodeGraphs(
        forward, max_num_seqs=5, max_blocks=3, block_size=4, null_block=9, null_window_block=7, device=meta,
        capture=capture,
    )  # fmt: skip
    for batch, size in zip(seen, (5, 4, 2, 1), strict=True):
        assert batch.only_decodes and len(batch.token_ids_T) == len(batch.chunk_ends_C) == size
        assert batch.tensors is not None and batch.tensors.slots_T.device == meta
        assert batch.block_table_RW.shape == batch.tensors.block_table_RW.shape == (size, 3)


@pytest.fixture(scope="module")
def window_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sliding layers have a pool and a null block of their own."""
    folder: Path = tmp_path_factory.mktemp("tiny_olmo3")
    torch.manual_seed(0)
    Olmo3ForCausalLM(
        Olmo3Config(
            vocab_size=22,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
            initializer_range=0.2,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    ).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("windowed", [False, True])
def test_an_engine_that_replays_draws_the_same(
    model_folder: str, window_folder: str, windowed: bool, kernels: Any
) -> None:
    """Batches that grow and shrink, block borders, preemption, and an update in place in the middle."""
    folder = window_folder if windowed else model_folder
    seen = []
    for graphs in (False, True):
        llm = LLM(folder, kernels=kernels, threads=1, cuda_graphs=graphs, block_size=2, kv_cache_tokens=120)
        assert (llm.engine.runner._graphs is not None) == graphs
        tokens = []
        for version, count in enumerate((8, 1, 5, 1)):
            params = [SamplingParams(max_tokens=12 + 3 * index, seed=3, ignore_eos=True) for index in range(count)]
            ids = [llm.add_request(*one) for one in zip(PROMPTS[:count], params, strict=True)]
            for _ in range(6):
                llm.step()
            update = [(name, tensor * 1.05) for name, tensor in llm.engine.decoder.tensors.items()]
            llm.update_weights(update, version + 1)
            done = {}
            while llm.has_unfinished():
                done.update({out.request_id: out.samples[0] for out in llm.step()})
            tokens += [(done[rid].token_ids, done[rid].version_spans) for rid in ids]
            if kernels == "auto":
                tokens += [done[rid].logprobs for rid in ids]
        assert llm.stats()["preemptions"] > 0
        seen.append(tokens)
    assert seen[0] == seen[1]


def test_padding_writes_the_null_block_and_no_other(window_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(window_folder, kv_cache_tokens=240, block_size=4, prefix_caching=False, cuda_graphs=True, max_num_seqs=16)
    pools, kv = llm.engine.runner.pools, llm.engine.scheduler.kv
    for pool in (pools.full, pools.windowed):
        pool.data_LB2KX.fill_(torch.nan)
    assert kv.window_allocator is not None
    handed_out: dict[int, set[int]] = {}
    for which, allocator in enumerate((kv.allocator, kv.window_allocator)):
        handed_out[which] = set()

        def recorded(count: int, allocate: Any = allocator.allocate, found: set[int] = handed_out[which]) -> list[int]:
            blocks = allocate(count)
            found.update(blocks)
            return blocks

        monkeypatch.setattr(allocator, "allocate", recorded)
    outs = llm.generate(PROMPTS[:5], SamplingParams(max_tokens=6, ignore_eos=True))
    assert all(sample.error is None for out in outs for sample in out.samples)
    for which, (pool, allocator) in enumerate(
        zip((pools.full, pools.windowed), (kv.allocator, kv.window_allocator), strict=True)
    ):
        null = allocator.num_blocks
        written = {b for b in range(null + 1) if not torch.isnan(pool.data_LB2KX[:, b]).all()}
        assert written == handed_out[which] | {null}
