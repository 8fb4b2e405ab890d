"""Decoders with the shapes of well-known models and random weights, and a decode or prefill step over random KV."""

from dataclasses import dataclass

import numpy as np
import torch

from inference.model.architecture import Architecture, Layer
from inference.model.decoder import Decoder
from inference.model.kv_pools import KVPools
from inference.model.rope import Rope
from inference.step_batch import StepBatch, make_batch

_BLOCK_SIZE = 16
_CHUNK = 1 << 28  # values drawn at once


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    tied: bool = False


SMALL = ModelShape("135M", 9, 3, 64, 576, 1536, 30, 49152, tied=True)  # SmolLM2
MEDIUM = ModelShape("1B", 32, 8, 64, 2048, 8192, 16, 128256, tied=True)  # Llama 3.2
LARGE = ModelShape("7B", 32, 8, 128, 4096, 14336, 32, 32768)  # Mistral
TINY = ModelShape("tiny", 4, 2, 16, 32, 48, 2, 97)  # for the dry run


def random_decoder(shape: ModelShape, *, length: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    arch = Architecture(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layers=(Layer(None, Rope(1e4)),) * shape.layers,
        norm_eps=1e-5,
        tied=shape.tied,
        max_positions=length,
    )
    decoder = Decoder(arch, dtype=dtype, device=device, max_model_len=length, kernels="triton")
    generator = torch.Generator(device).manual_seed(0)
    for tensor in decoder.tensors.values():
        tensor.normal_(0, 0.02, generator=generator)
        if tensor.ndim == 1:
            tensor.add_(1)
    return decoder


def random_step(decoder: Decoder, chunks: list[tuple[int, int]]) -> tuple[StepBatch, KVPools]:
    """`chunks`: tokens already there and tokens to compute; blocks lie in random order over the pool."""
    rng = np.random.default_rng(0)
    counts = [-(-(start + count) // _BLOCK_SIZE) for start, count in chunks]
    pools = KVPools(
        decoder.local, sum(counts), None, block_size=_BLOCK_SIZE, dtype=decoder.dtype, device=decoder.device
    )
    generator = torch.Generator(decoder.device).manual_seed(1)
    for part in pools.full.data_LB2KX.view(-1).split(_CHUNK):
        part.normal_(generator=generator)
    blocks = rng.permutation(sum(counts)).astype(np.int32)
    table = np.zeros((len(chunks), max(counts)), np.int32)
    ends = np.cumsum(counts)
    for row, count in enumerate(counts):
        table[row, :count] = blocks[ends[row] - count : ends[row]]
    positions = [start + i for start, count in chunks for i in range(count)]
    rows = [row for row, (_, count) in enumerate(chunks) for _ in range(count)]
    tokens = rng.integers(0, decoder.arch.vocab_size, len(rows)).tolist()
    last = np.cumsum([count for _, count in chunks]).tolist()
    return make_batch(tokens, positions, rows, last, table, block_size=_BLOCK_SIZE), pools
