"""An engine whose keys and values are int8: memory, the same tokens in any batch, what is lost, updates, KV kept."""

from typing import Any

import numpy as np
import pytest

from inference import LLM, SamplingParams
from olmorl.contract.errors import ConfigError

OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_tokens": 512}
INT8 = OPTIONS | {"kv_cache_dtype": "int8"}
PROMPTS = [[1, 10, 2, 11], [3, 3, 3], [5, 4, 3, 2, 1, 0, 7], [9]]
SAMPLED = SamplingParams(n=3, max_tokens=40, seed=4, ignore_eos=True)


def test_a_key_takes_a_byte_a_number_and_four_for_its_scale(model_folder: str) -> None:
    floats, ints = LLM(model_folder, **OPTIONS), LLM(model_folder, **INT8)
    arch = floats.engine.decoder.arch
    pools = [llm.engine.runner.pools for llm in (floats, ints)]
    vectors = pools[0].num_bytes // (4 * arch.head_dim)
    assert pools[1].num_bytes == vectors * (arch.head_dim + 4)
    for llm in (floats, ints):
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=9, ignore_eos=True, temperature=0))
    kv = 2 * len(arch.layers) * arch.num_kv_heads * (sum(range(4, 13)) + 12)  # read once a step, written once
    lost = floats.stats()["bytes"] - ints.stats()["bytes"]
    assert lost == kv * (4 * arch.head_dim - arch.head_dim - 4)


def test_a_request_is_bitwise_the_same_alone_in_a_batch_and_after_a_preemption(model_folder: str) -> None:
    together = LLM(model_folder, deterministic=True, **INT8).generate(PROMPTS, SAMPLED)
    alone = LLM(model_folder, deterministic=True, max_tokens_per_step=2, **INT8)
    tight = LLM(model_folder, deterministic=True, block_size=4, **(INT8 | {"kv_cache_tokens": 160}))
    for prompt, output, pressed in zip(PROMPTS, together, tight.generate(PROMPTS, SAMPLED), strict=True):
        (single,) = alone.generate([prompt], SAMPLED)
        for sample, one, other in zip(output.samples, single.samples, pressed.samples, strict=True):
            assert (sample.token_ids, sample.logprobs) == (one.token_ids, one.logprobs)
            assert (sample.token_ids, sample.logprobs) == (other.token_ids, other.logprobs)
    assert tight.stats()["preemptions"] > 0


def test_what_is_lost_is_little_and_the_torch_twin_loses_the_same(model_folder: str) -> None:
    sequences = [np.arange(21, dtype=np.int64), np.array([4, 4, 10, 2, 2, 2, 19])]
    ints, twin, floats = (
        np.concatenate(LLM(model_folder, **kind).score(sequences))
        for kind in (INT8, INT8 | {"kernels": "torch"}, OPTIONS)
    )
    lost = np.abs(ints - floats)
    assert 1e-5 < lost.mean() < 0.02
    assert np.median(np.abs(ints - twin)) < 1e-5 and np.abs(ints - twin).mean() < lost.mean() / 4


def test_keys_and_values_outlive_an_update_of_quantised_weights(model_folder: str) -> None:
    llm = LLM(model_folder, quantization="int4", **INT8)
    weights = {name: tensor.clone() for name, tensor in LLM(model_folder).engine.decoder.tensors.items()}
    llm.add_request(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(5):
        llm.step()
    llm.update_weights(weights.items(), version=1)
    finished = []
    while llm.has_unfinished():
        finished += llm.step()
    assert finished[0].samples[0].version_spans == [(0, 0, 5), (1, 5, 20)]
    assert llm.stats()["recomputed_tokens"] == 0


def test_wrong_settings_are_named(model_folder: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8'; it must be one of auto, int8"):
        LLM(model_folder, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="kv_cache_dtype 'int8' is kept on one device; tensor_parallel_size is 2"):
        LLM(model_folder, tensor_parallel_size=2, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="which Triton's attention does not read"):
        LLM(model_folder, kernels="triton", kv_cache_dtype="int8")
