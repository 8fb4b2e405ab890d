"""The compiled decoder against its torch twin, and its promise that a token does not depend on who is in its step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.kernels import cpu_int8_kv
from inference.model import kv_int8
from inference.model.architecture import Architecture, Layer
from inference.model.compiled_decoder import CompiledDecoder
from inference.model.decoder import Decoder
from inference.model.kv_pools import KVPools
from inference.model.rope import Rope
from inference.step_batch import StepBatch, make_batch

Chunk = tuple[int, int]  # tokens already there, tokens of this step
CHUNKS = [(0, 13), (5, 1), (40, 1), (15, 2), (16, 1), (31, 3)]
VOCAB = 61
HEAD_DIM = 16  # of most decoders here


def make_decoder(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 48,
    windows: tuple[int | None, ...] = (None, None),
    length: int = 128,
    **switches: object,
) -> Decoder:
    rope = Rope(1e4)
    arch = Architecture(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=72,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(Layer(window, rope) for window in windows),
        norm_eps=1e-5,
        tied=False,
        max_positions=length,
        **switches,  # type: ignore[arg-type]
    )
    decoder = Decoder(arch, dtype=torch.float32, device=torch.device("cpu"), max_model_len=length)
    generator = torch.Generator().manual_seed(3)
    for tensor in decoder.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.ndim == 1))
    return decoder


def make_pool(decoder: Decoder, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> KVPools:
    return KVPools(decoder.arch, num_blocks, None, block_size=block_size, dtype=dtype, device=torch.device("cpu"))


def make_step(chunks: list[Chunk], block_size: int, seed: int = 0) -> tuple[StepBatch, int]:
    rng = np.random.default_rng(seed)
    counts = [-(-(start + count) // block_size) for start, count in chunks]
    table = np.zeros((len(chunks), max(counts)), np.int32)
    blocks = rng.permutation(sum(counts) + 3)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = blocks[used : used + count]
        used += count
    positions = [start + i for start, count in chunks for i in range(count)]
    rows = [row for row, (_, count) in enumerate(chunks) for _ in range(count)]
    ends = np.cumsum([count for _, count in chunks]).tolist()
    tokens = rng.integers(0, VOCAB, len(rows)).tolist()
    return make_batch(tokens, positions, rows, ends, table, block_size=block_size), sum(counts) + 3


def fill(pool: KVPools, batch: StepBatch, chunks: list[Chunk]) -> None:
    """Something in every live place, NaN in all others: whatever is read without being live shows."""
    live = torch.zeros(pool.full.data_LB2KX.shape[1], pool.block_size, dtype=torch.bool)
    for row, (start, _) in enumerate(chunks):
        for position in range(start):
            live[batch.block_table_RW[row, position // pool.block_size], position % pool.block_size] = True
    generator = torch.Generator().manual_seed(5)
    if pool.int8:
        for index in range(len(pool.full.data_LB2KX)):
            for part, keys in zip(pool.layer(index), (True, False), strict=True):
                numbers_BKSD, scales_BKS = kv_int8.views(part, HEAD_DIM, keys=keys)
                numbers_BKSD.copy_(torch.randint(-127, 128, numbers_BKSD.shape, generator=generator))
                scales_BKS.copy_(torch.rand(scales_BKS.shape, generator=generator).where(live[:, None], torch.nan) / 64)
        return
    for index in range(len(pool.full.data_LB2KX)):
        for places, part in zip((live[:, None, None], live[:, None, :, None]), pool.layer(index), strict=True):
            part.copy_(torch.randn(part.shape, generator=generator).where(places, torch.nan))


SWITCHES = [
    {},
    {"norms": "post", "qk_norm": "whole"},
    {"qk_norm": "head", "qkv_bias": True, "out_bias": True, "mlp_bias": True},
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "hidden"), [(9, 3, 64, 40), (5, 1, 8, 17), (4, 4, 24, 64)])
@pytest.mark.parametrize("switches", SWITCHES, ids=["plain", "post", "bias"])
@pytest.mark.parametrize(("block_size", "window"), [(1, None), (4, 7), (16, None), (32, 16), (24, 20)])
def test_compiled_equals_torch(
    heads: int, kv_heads: int, head_dim: int, hidden: int, switches: dict[str, str], block_size: int, window: int | None
) -> None:
    decoder = make_decoder(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden, windows=(None, window), **switches
    )
    assert decoder.compiled is not None
    batch, num_blocks = make_step(CHUNKS, block_size)
    results = []
    for forward in (decoder.forward, decoder.forward_torch):
        pool = make_pool(decoder, num_blocks, block_size)
        fill(pool, batch, CHUNKS)
        results.append((forward(batch, pool), *pool.layer(0), *pool.layer(1)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=2e-5, rtol=2e-5, equal_nan=True)
    hidden_TM = results[0][0]
    assert torch.isfinite(hidden_TM).all()
    torch.testing.assert_close(decoder.logits(hidden_TM), hidden_TM @ decoder.head.T, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("block_size", "window"), [(1, None), (4, 7), (16, None), (32, 16), (24, 20), (600, 40)])
def test_int8_keys_and_values_equal_torch(block_size: int, window: int | None) -> None:
    """Where the last digit of a number differs, its rounding may: now and then one of a written key's differs by 1."""
    decoder = make_decoder(heads=6, kv_heads=2, windows=(None, window))
    batch, num_blocks = make_step(CHUNKS, block_size)
    hidden, pools = [], []
    for forward in (decoder.forward, decoder.forward_torch):
        pools.append(make_pool(decoder, num_blocks, block_size, torch.int8))
        fill(pools[-1], batch, CHUNKS)
        hidden.append(forward(batch, pools[-1]))
    assert torch.isfinite(hidden[0]).all()
    torch.testing.assert_close(*hidden, atol=2e-3, rtol=2e-3)
    for index in range(2):
        for keys, parts in enumerate(zip(*(pool.layer(index)[::-1] for pool in pools), strict=True)):
            (numbers, scales), (other, same) = (kv_int8.views(part, HEAD_DIM, keys=bool(keys)) for part in parts)
            difference = (numbers.int() - other.int()).abs()
            assert difference.max() <= 1 and difference.float().mean() < 1e-3
            torch.testing.assert_close(scales, same, rtol=2e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_int8_is_written_and_read_bit_for_bit_as_torch_does(keys: bool) -> None:
    block_size, slots = 5, [7, 3, 9, 0]
    x_TKD = torch.randn(4, 2, HEAD_DIM) * torch.tensor([1e-3, 1.0, 50.0, 0.0])[:, None, None]
    x_TKD[1, 1, 3] = torch.inf
    there, here = (torch.zeros(2, 2, block_size * (HEAD_DIM + 4), dtype=torch.int8) for _ in "ab")
    kv_int8.store(there, torch.tensor(slots), x_TKD, keys=keys)
    for slot, x_KD in zip(slots, x_TKD.numpy(), strict=True):
        place = slot % block_size
        first, step = (place, block_size) if keys else (place * HEAD_DIM, 1)
        for head, x_D in zip(here[slot // block_size], x_KD, strict=True):
            cpu_int8_kv.store_int8(x_D, head.data_ptr(), block_size, place, first, step)
    finite = torch.ones(2, block_size, dtype=torch.bool)
    finite[0, 3] = False
    numbers, scales = kv_int8.views(there, HEAD_DIM, keys=keys)
    assert not scales[0, 1, 3].isfinite() and not kv_int8.views(here, HEAD_DIM, keys=keys)[1][0, 1, 3].isfinite()
    for one, other in zip((numbers, scales), kv_int8.views(here, HEAD_DIM, keys=keys), strict=True):
        assert torch.equal(one[finite[:, None].expand(2, 2, -1)], other[finite[:, None].expand(2, 2, -1)])
    read_KCD = kv_int8.gather(there, torch.tensor([1]), HEAD_DIM, keys=keys)
    out_X = np.zeros(block_size * HEAD_DIM, np.float32)
    if keys:
        cpu_int8_kv.unpack_keys(there[1, 0].data_ptr(), block_size, HEAD_DIM, out_X)
        assert np.array_equal(out_X.reshape(HEAD_DIM, block_size).T, read_KCD[0].numpy())
    else:
        cpu_int8_kv.unpack_values(there[1, 0].data_ptr(), block_size, HEAD_DIM, 2, 3, out_X)
        assert np.array_equal(out_X.reshape(block_size, HEAD_DIM)[:3], read_KCD[0, 2:].numpy())
    error = (read_KCD[:, 2] - x_TKD[0]).abs().amax(1) / x_TKD[0].abs().amax(1)
    assert (error < 0.5 / 127 + 1e-6).all()


@pytest.mark.parametrize("block_size", [1, 16, 24, 600])
def test_long_contexts_are_summed_in_tiles(block_size: int) -> None:
    chunks = [(1500, 1), (511, 2), (1024, 3)]
    decoder = make_decoder(windows=(None, 700), length=1600)
    batch, num_blocks = make_step(chunks, block_size)
    results = []
    for forward in (decoder.forward, decoder.forward_torch):
        pool = make_pool(decoder, num_blocks, block_size)
        fill(pool, batch, chunks)
        results.append(forward(batch, pool))
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=2e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.int8]),
)
def test_a_token_is_bitwise_the_same_in_any_step(chunks: list[Chunk], kv_dtype: torch.dtype) -> None:
    """All chunks together, against each token alone: other rows, other chunking, other block shapes."""
    decoder = make_decoder(heads=6, kv_heads=2, windows=(None, 9))
    assert decoder.compiled is not None
    batch, num_blocks = make_step(chunks, 16)
    together = make_pool(decoder, num_blocks, 16, kv_dtype)
    fill(together, batch, chunks)
    alone = make_pool(decoder, num_blocks, 16, kv_dtype)
    alone.full.data_LB2KX.copy_(together.full.data_LB2KX)
    hidden_TM = decoder.forward(batch, together)
    logits_TV = decoder.logits(hidden_TM).clone()
    for t in range(len(batch.token_ids_T)):
        one = StepBatch(
            *(array[t : t + 1] for array in (batch.token_ids_T, batch.positions_T, batch.rows_T, batch.slots_T)),
            np.array([1]),
            batch.block_table_RW,
        )
        row = decoder.forward(one, alone)
        assert torch.equal(row[0], hidden_TM[t])
        assert torch.equal(decoder.logits(row)[0], logits_TV[t])
    both = (pool.full.data_LB2KX.view(torch.uint8) for pool in (together, alone))
    assert torch.equal(*both)


def test_nan_in_one_sequence_shows_and_stays_there() -> None:
    decoder = make_decoder(windows=(None,))
    batch, num_blocks = make_step(CHUNKS, 4)
    batch.token_ids_T[:] = 0
    batch.token_ids_T[13] = 1  # the single token of chunk 1
    decoder.embedding[1] = torch.nan
    pool = make_pool(decoder, num_blocks, 4)
    hidden_TM = decoder.forward(batch, pool)
    assert torch.isnan(hidden_TM).any(-1).nonzero()[:, 0].tolist() == [13]


def test_threads_do_not_change_a_bit() -> None:
    decoder = make_decoder(windows=(None, 20), hidden=96)
    batch, num_blocks = make_step(CHUNKS, 16)
    results = []
    for threads in (1, 3):
        compiled = CompiledDecoder(decoder, max_model_len=128, threads=threads, flops_per_thread=1)
        pool = make_pool(decoder, num_blocks, 16)
        fill(pool, batch, CHUNKS)
        hidden_TM = compiled.forward(batch, pool)
        results.append((hidden_TM, compiled.logits(hidden_TM)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
