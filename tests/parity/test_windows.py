"""Sliding layers hold only their window: the same tokens as transformers, out of a fraction of the memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Olmo3Config, PreTrainedModel, Qwen2Config

from inference import LLM, SamplingParams

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "olmo3": Olmo3Config(**SMALL, sliding_window=11),
    "all_slide": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=0),
}
NEW = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, n=2, ignore_eos=True)
PROMPTS = [np.random.default_rng(length).integers(0, 61, length).tolist() for length in (3, 11, 24, 60, 61)]
Model = tuple[str, PreTrainedModel, list[list[int]]]


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    torch.manual_seed(3)
    config = CONFIGS[request.param]
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    folder: Path = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    yield str(folder), made, [greedy(made, prompt) for prompt in PROMPTS]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    cache, ids, out = DynamicCache(config=model.config), prompt, []  # type: ignore[var-annotated]
    for _ in range(NEW):
        out.append(int(model(torch.tensor([ids]), past_key_values=cache).logits[0, -1].argmax()))
        ids = out[-1:]
    return out


def run(llm: LLM, each_step: Callable[[LLM], None] = lambda llm: None) -> list[list[int]]:
    rids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    done = {}
    while llm.has_unfinished():
        done.update({out.request_id: out for out in llm.step()})
        each_step(llm)
    for rid in rids:
        assert done[rid].samples[0].token_ids == done[rid].samples[1].token_ids
    return [done[rid].samples[0].token_ids for rid in rids]


def poison_free_blocks(llm: LLM) -> None:
    """Whatever is read without being held makes NaN logits, which end a request."""
    for index, layer in enumerate(llm.engine.decoder.layers):
        allocator = llm.engine.scheduler.allocator if layer.attention.window is None else window_allocator(llm)
        free = [block for block in range(allocator.num_blocks) if allocator.ref_counts[block] == 0]
        for part in llm.engine.runner.pools.layer(index):
            part[free] = torch.nan


def window_allocator(llm: LLM):  # type: ignore[no-untyped-def]
    return llm.engine.scheduler.kv.window_allocator


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4},
        {"block_size": 1, "max_tokens_per_step": 7},
        {"block_size": 16, "max_tokens_per_step": 30, "max_num_seqs": 4},
        {"block_size": 4, "kv_cache_tokens": 240, "max_num_seqs": 6},
        {"block_size": 4, "batching": "static", "max_num_seqs": 3},
    ],
)
def test_nothing_outside_the_window_is_held_or_read(model: Model, options: dict[str, int]) -> None:
    folder, _, expected = model
    llm = LLM(folder, prefix_caching=False, **{"kv_cache_tokens": 1200} | options)
    assert run(llm, poison_free_blocks) == expected
    assert (llm.stats()["preemptions"] > 0) == ("kv_cache_tokens" in options)
    allocator = window_allocator(llm)
    assert allocator.num_free == allocator.num_blocks and llm.stats()["kv_usage"] == 0


@pytest.mark.filterwarnings("ignore")
def test_prefixes_are_found_with_their_window(model: Model) -> None:
    folder, made, expected = model
    llm = LLM(folder, block_size=4, max_num_seqs=16)
    assert run(llm) == expected
    computed = llm.stats()["prefill_tokens_computed"]
    llm.generate(PROMPTS[3:], SamplingParams(max_tokens=1))
    hits = llm.stats()["prefix_hits"]
    assert run(llm) == expected and llm.stats()["prefix_hits"] > hits > 0
    assert llm.stats()["prefill_tokens_computed"] < 2 * computed + sum(map(len, PROMPTS[3:]))
    # Another model's blocks are not found, in either pool.
    second = {name: tensor * 1.1 for name, tensor in made.state_dict().items()}
    llm.update_weights(second.items(), version=1)
    cold = LLM(folder, prefix_caching=False)
    cold.update_weights(second.items(), version=1)
    assert run(llm) == run(cold) != expected


def test_memory_and_bytes_read_follow_the_window(tmp_path: Path) -> None:
    config = Olmo3Config(**SMALL | {"max_position_embeddings": 4096}, sliding_window=64)  # type: ignore[arg-type]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), max_num_seqs=4, kv_cache_tokens=16384, max_tokens_per_step=256)
    head_bytes = 2 * 16 * 4  # keys and values, head size, float32
    full, window = 16384, 16 * (4 * (63 // 16 + 1 + 2) + 256 // 16)
    assert llm.engine.runner.pools.num_bytes == head_bytes * (1 * full + 3 * window)
    llm.generate([[1] * 2000], SamplingParams(max_tokens=1))
    before = llm.stats()["bytes"]
    llm.generate([[1] * 2000], SamplingParams(max_tokens=2, ignore_eos=True))
    decoder = llm.engine.decoder
    once = (decoder.num_parameters - decoder.embedding.numel()) * 4
    hits = 2000 - 2000 % 16 - 16 * (2000 % 16 == 0)
    prefill = once + (2000 - hits) * (32 * 4 + 4 * head_bytes) + head_bytes * (2000 + 3 * 64)
    decode = once + 32 * 4 + 4 * head_bytes + head_bytes * (2001 + 3 * 64)
    assert llm.stats()["bytes"] - before == prefill + decode
