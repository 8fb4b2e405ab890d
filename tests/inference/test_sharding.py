"""What each rank holds, and that 2, 4 and 8 ranks together compute what one does: in threads, over gloo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from inference.model.architecture import Architecture, Layer
from inference.model.decoder import Decoder
from inference.model.kv_pools import KVPools
from inference.model.rope import Rope
from inference.model.sharding import check_divisible, local_architecture, shard_of
from inference.model.tensor_parallel import TensorParallel, join_group
from inference.stats import CostModel
from inference.step_batch import dense_batch
from olmorl.contract.errors import ConfigError, WorkerError

ARCH = Architecture(
    vocab_size=23,
    hidden_size=24,
    intermediate_size=16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    layers=(Layer(None, Rope(1e4)), Layer(5, Rope(1e4))),
    norm_eps=1e-6,
    tied=False,
    max_positions=64,
    norms="post",
    qk_norm="whole",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
CPU = torch.device("cpu")


def decoder(ranks: TensorParallel, arch: Architecture = ARCH) -> Decoder:
    return Decoder(arch, dtype=torch.float32, device=CPU, max_model_len=64, kernels="torch", ranks=ranks)


def each_rank(size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(join_group(rank, size, store, CPU)), range(size)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_together_compute_what_one_does(size: int) -> None:
    """KV heads are divided by 2 ranks and replicated by 4 and 8; 23 tokens are divided evenly by none of them."""
    torch.manual_seed(0)
    whole = decoder(TensorParallel())
    for tensor in whole.tensors.values():
        tensor.copy_(torch.randn(tensor.shape) * 0.3)
    batch, num_blocks = dense_batch([np.array([22, 3, 11, 12, 0, 5, 9]), np.array([1])], block_size=2)

    def logits(one: Decoder) -> torch.Tensor:
        pools = KVPools(one.local, num_blocks, None, block_size=2, dtype=torch.float32, device=CPU)
        hidden_TM = one.forward(batch, pools)
        return one.logits(hidden_TM if one.ranks.rank == 0 else torch.empty_like(hidden_TM))

    def work(ranks: TensorParallel) -> Any:
        part = decoder(ranks)
        for name, tensor in part.tensors.items():
            tensor.copy_(part.shards[name].of(whole.tensors[name]))
        return logits(part), part.whole_tensors(), part.num_resident_parameters

    leader, *followers = each_rank(size, work)
    torch.testing.assert_close(leader[0], logits(whole), atol=2e-5, rtol=1e-5)
    for name, tensor in leader[1].items():
        assert torch.equal(tensor, whole.tensors[name]), name
    replicas = max(1, size // ARCH.num_kv_heads)
    twice = sum(t.numel() for n, t in whole.tensors.items() if "k_proj" in n or "v_proj" in n or "k_norm" in n)
    everywhere = sum(t.numel() for n, t in whole.tensors.items() if "layernorm" in n or n == "model.norm.weight")
    everywhere += sum(t.numel() for n, t in whole.tensors.items() if n.endswith(("o_proj.bias", "down_proj.bias")))
    extra = (replicas - 1) * twice + (size - 1) * everywhere
    assert all(rank[2] == whole.num_parameters + extra for rank in (leader, *followers))


def test_bytes_of_a_step_count_what_all_ranks_read() -> None:
    """Weights once each where they are; keys and values as often as they are held."""
    batch, _ = dense_batch([np.arange(6)], block_size=2)
    one = CostModel(ARCH, num_parameters=1000, element_size=4)
    replicated = CostModel(
        replace(ARCH, num_kv_heads=local_architecture(ARCH, 4).num_kv_heads * 4), num_parameters=1000, element_size=4
    )
    per_head = 2 * ARCH.head_dim * 4
    moved = (6 + 5) + 6 * 2  # what the two layers read, and what they write
    assert replicated.body(batch)[1] - one.body(batch)[1] == (4 - 2) * per_head * moved


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_index_is_held_and_heads_go_where_their_queries_are(size: int) -> None:
    whole = decoder(TensorParallel())
    for name, tensor in whole.tensors.items():
        shards = [shard_of(name, tuple(tensor.shape), ARCH, rank=rank, size=size) for rank in range(size)]
        held = [index for shard in shards for index in range(shard.start, shard.start + shard.length)]
        assert set(held) == set(range(tensor.shape[shards[0].dim]))
    q, k = ((64, 24), (16, 24))
    for head in range(8):
        rank = head * size // 8
        key_head = head // 4
        shard = shard_of("model.layers.0.self_attn.k_proj.weight", k, ARCH, rank=rank, size=size)
        assert shard.start <= key_head * 8 < shard.start + shard.length
        first = shard_of("model.layers.0.self_attn.q_proj.weight", q, ARCH, rank=rank, size=size).start // 8
        local = local_architecture(ARCH, size)
        assert (head - first) // (local.num_heads // local.num_kv_heads) == key_head - shard.start // 8


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, 3, "does not divide the model's 8 attention heads"),
        ({"intermediate_size": 18}, 4, "does not divide the model's 18 MLP features"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "of the model's 3 key/value heads"),
        ({"vocab_size": 5}, 4, "the last rank would have none of 5 tokens"),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, int], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divisible(replace(ARCH, **change), size)


def test_a_collective_without_a_partner_is_a_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.model.tensor_parallel.TIMEOUT", timedelta(seconds=0.5))

    def work(ranks: TensorParallel) -> str:
        if ranks.rank == 1:
            return ""
        with pytest.raises(WorkerError, match="rank 0 of 2 lost its tensor-parallel group") as raised:
            ranks.sum(torch.ones(3))
        return str(raised.value)

    assert each_rank(2, work)[0]
