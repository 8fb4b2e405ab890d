"""The engine on its Triton kernels: each family against transformers and the torch path, graphs, updates, memory.

Without a GPU this is the interpreter, a thousand times slower: the models are tiny and the texts short.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Olmo3Config, Qwen2Config, Qwen3Config

from inference import LLM, SamplingParams
from inference.gpu_check.random_model import TINY, random_decoder, random_step
from inference.gpu_sampling import GpuSampler
from inference.kv_blocks import window_pool_blocks
from inference.memory_plan import blocks_that_fit, kv_room, largest_step
from inference.model.architecture import Architecture
from inference.model.decoder import Decoder
from inference.model.kv_pools import KVPools
from inference.step_batch import StepBatch
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,  # wide logits: near ties would make "token for token" a matter of luck
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, head_dim=16),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "olmo2": Olmo2Config(**COMMON),
    "olmo3": Olmo3Config(**COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}
PROMPTS = [list(range(1, 14)), [5, 6], [9] * 7]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param], dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.eval().save_pretrained(folder)
    return folder, model


def engine(folder: Path, device: torch.device, kernels: str = "triton", **options: Any) -> LLM:
    small = {"max_num_seqs": 4, "kv_cache_tokens": 256, "block_size": 4, "max_tokens_per_step": 16}
    return LLM(folder, device=str(device), kernels=kernels, **{**small, **options})


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_greedy_equals_transformers(family: tuple[Path, Any], device: torch.device) -> None:
    folder, model = family
    outs = engine(folder, device).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4))
    for prompt, out in zip(PROMPTS, outs, strict=True):
        ids = list(prompt)
        for _ in range(4):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert out.samples[0].token_ids == ids[len(prompt) :]


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_everything_equals_the_torch_path(family: tuple[Path, Any], device: torch.device) -> None:
    """Chunks, preemption, groups, all rules of sampling, scores, prompt logprobs."""
    params = [
        SamplingParams(n=2, temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=9, logprobs=2),
        SamplingParams(seed=1, repetition_penalty=1.2, frequency_penalty=0.1, max_tokens=12, prompt_logprobs=True),
        SamplingParams(n=2, seed=2, min_p=0.1, max_tokens=10),
    ]
    found = []
    for kernels in ("triton", "torch"):
        llm = engine(family[0], device, kernels, kv_cache_tokens=32, max_num_seqs=4)
        outs = llm.generate(PROMPTS, params)
        samples = [sample for out in outs for sample in out.samples]
        scores = llm.score([np.array(prompt) for prompt in PROMPTS])
        found.append((samples, outs[1].prompt_logprobs, scores, llm.stats()["preemptions"]))
    (ours, prompts, scores, preemptions), (theirs, prompts_torch, scores_torch, _) = found
    assert preemptions > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-4)
    np.testing.assert_allclose(prompts[1:], prompts_torch[1:], atol=1e-4)
    for one, other in zip(scores, scores_torch, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("family", ["olmo3"], indirect=True)
def test_a_weight_update_keeps_the_kv(family: tuple[Path, Any], device: torch.device) -> None:
    """Torch path and kernels take the same update in the middle of the same request."""
    found = []
    for kernels in ("triton", "torch"):
        llm = engine(family[0], device, kernels)
        llm.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=5))
        llm.step(), llm.step()
        pointers = [tensor.data_ptr() for tensor in llm.engine.decoder.tensors.values()]
        tensors = {name: tensor.clone() * 0.7 for name, tensor in llm.engine.decoder.tensors.items()}
        llm.update_weights(tensors.items(), version=3)
        assert pointers == [tensor.data_ptr() for tensor in llm.engine.decoder.tensors.values()]
        while not (finished := llm.step()):
            pass
        found.append(finished[0].samples[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].version_spans == [(0, 0, 2), (3, 2, 5)]
    np.testing.assert_allclose(found[0].logprobs, found[1].logprobs, atol=1e-4)


@pytest.mark.parametrize("family", ["olmo3"], indirect=True)
def test_static_buffers_and_a_step_ahead_change_nothing(family: tuple[Path, Any], device: torch.device) -> None:
    """Padded rows on the null block, and penalties that count a token which the host has not read yet."""
    params = SamplingParams(n=3, seed=4, max_tokens=6, repetition_penalty=1.3, frequency_penalty=0.3, top_p=0.9)
    found = []
    for options in ({"cuda_graphs": True, "overlap": True}, {"cuda_graphs": False, "overlap": False}):
        out = engine(family[0], device, max_num_seqs=5, **options).generate(PROMPTS[:1], params)[0]
        found.append(out.samples)
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", ["olmo3"], indirect=True)
def test_guesses_change_nothing(family: tuple[Path, Any], device: torch.device) -> None:
    """The second time the text is known. Where the device counts tokens for penalties nothing is guessed."""
    llm = engine(family[0], device, speculative="suffix", prefix_caching=False, cuda_graphs=True, overlap=True)
    params = [
        SamplingParams(seed=4, max_tokens=9, top_p=0.9, logprobs=1),
        SamplingParams(seed=4, max_tokens=9, frequency_penalty=0.3),
    ]
    found, steps, drafted = [], [0.0], [0.0]
    for one in [params[0], params[0], params[1], params[1]]:
        found.append(llm.generate(PROMPTS[:1], one)[0].samples[0])
        steps.append(llm.stats()["steps"])
        drafted.append(llm.stats()["drafted_tokens"])
    assert found[0].token_ids == found[1].token_ids and found[2].token_ids == found[3].token_ids
    np.testing.assert_allclose(found[0].logprobs, found[1].logprobs, atol=1e-5)
    assert steps[2] - steps[1] < steps[1] and drafted[2] > drafted[1] and drafted[4] == drafted[2]


@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none")
@pytest.mark.parametrize("family", ["olmo3", "llama"], indirect=True)
def test_two_ranks_equal_one(family: tuple[Path, Any], device: torch.device) -> None:
    found = []
    for size in (1, 2):
        llm = engine(family[0], torch.device(device.type), tensor_parallel_size=size)
        found.append([out.samples[0].token_ids for out in llm.generate(PROMPTS, SamplingParams(seed=1, max_tokens=4))])
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama"], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.soak)])
def test_half_precision_is_close_to_float32(family: tuple[Path, Any], device: torch.device, dtype: str) -> None:
    tokens = [np.array(PROMPTS[0])]
    half = engine(family[0], device, dtype=dtype, max_tokens_per_step=64)
    torch.testing.assert_close(
        half.score(tokens)[0], engine(family[0], device, "torch").score(tokens)[0], atol=0.25, rtol=0.05
    )
    torch_path = engine(family[0], device, "torch", dtype=dtype, max_tokens_per_step=64)
    assert np.abs(half.score(tokens)[0] - torch_path.score(tokens)[0]).mean() < 0.05
    hidden = torch.randn((2, 48), device=device).to(half.engine.decoder.dtype)
    logits = half.engine.decoder.logits(hidden)
    exact = hidden.double() @ half.engine.decoder.head.double().T
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)  # rounded nowhere on the way


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph needs CUDA")
def test_a_replayed_step_equals_an_eager_one_while_contexts_grow(device: torch.device) -> None:
    decoder = random_decoder(TINY, length=64, dtype=torch.float32, device=device)
    assert decoder.gpu is not None
    batch, pools = random_step(decoder, [(8, 1), (40, 1)])
    step = decoder.gpu.place(batch)
    decoder.gpu.forward_on_device(step, pools)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        hidden = decoder.gpu.forward_on_device(step, pools)
    for _ in range(3):
        step.attention.positions_T.add_(1)
        step.slots_T.add_(1)
        graph.replay()
        torch.testing.assert_close(hidden, decoder.gpu.forward_on_device(step, pools), atol=1e-5, rtol=1e-5)


def test_what_cannot_run_is_said() -> None:
    with pytest.raises(ConfigError, match="kernels is 'cuda'; it must be one of auto, torch, triton"):
        LLM("nowhere", kernels="cuda")
    with pytest.raises(ConfigError, match="gpu_memory_utilization is 0"):
        LLM("nowhere", gpu_memory_utilization=0)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_kernels_on_a_cpu_are_refused_without_the_interpreter(
    family: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.model.gpu_decoder.interpreted", lambda: False)
    with pytest.raises(ConfigError, match="take device 'cuda', or set TRITON_INTERPRET=1"):
        engine(family[0], torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_memory_is_measured_on_a_gpu_and_refused_on_a_cpu(family: tuple[Path, Any], device: torch.device) -> None:
    if device.type != "cuda":
        with pytest.raises(ConfigError, match="only a GPU's memory is measured"):
            engine(family[0], device, kv_cache_tokens=None)
        return
    llm = engine(family[0], device, kv_cache_tokens=None, gpu_memory_utilization=0.5)
    assert llm.engine.scheduler.allocator.num_blocks == 4 * 16  # all slots at full length


def test_the_largest_step_runs(device: torch.device) -> None:
    decoder = random_decoder(TINY, length=12, dtype=torch.float32, device=device)
    largest_step(decoder, EngineConfig(model="", max_num_seqs=3, max_tokens_per_step=17, max_model_len=12))


def test_the_largest_step_has_the_counts_of_penalties_beside_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay once a slot has had a penalty: there from before the prompts are computed, a row for each slot."""
    counted: list[tuple[int, int]] = []
    samplers: list[GpuSampler] = []
    decoder = random_decoder(TINY, length=12, dtype=torch.float32, device=device)
    forward = decoder.forward

    def make(decoder: Decoder) -> GpuSampler:
        samplers.append(GpuSampler(decoder.arch.vocab_size, device))
        return samplers[-1]

    def watched(batch: StepBatch, pools: KVPools) -> torch.Tensor:
        counted.extend(tuple(sampler._counts.counts_CV.shape) for sampler in samplers)  # type: ignore[misc]
        return forward(batch, pools)

    monkeypatch.setattr("inference.memory_plan.new_gpu_sampler", make)
    monkeypatch.setattr(decoder, "forward", watched)
    largest_step(decoder, EngineConfig(model="", max_num_seqs=3, max_tokens_per_step=17, max_model_len=12))
    assert len(counted) == 1 and counted[0][0] >= 3 and counted[0][1] == decoder.arch.vocab_size


def test_an_engine_that_has_a_share_of_the_gpu_plans_within_it() -> None:
    """Beyond its share torch would refuse it the memory, whether the learner has taken the rest yet or not."""
    whole = EngineConfig(model="", gpu_memory_utilization=0.9)
    assert kv_room(whole, total=1000, others=50, peak=100) == 750
    assert kv_room(replace(whole, gpu_share=0.4), total=1000, others=0, peak=100) == 260
    assert kv_room(replace(whole, gpu_share=0.4), total=1000, others=600, peak=100) == 200


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("room", [0, 1 << 12, 1 << 16, 1 << 20, 1 << 40])
def test_blocks_fill_the_room_and_no_more(device: torch.device, window: int | None, room: int) -> None:
    config = EngineConfig(model="", max_num_seqs=4, max_tokens_per_step=16, block_size=4, max_model_len=200)
    arch = engine_architecture(window)

    def used(blocks: int) -> int:
        sliding = 0
        if window is not None:
            sliding = window_pool_blocks(
                window, block_size=4, num_blocks=blocks, max_num_seqs=4, max_tokens_per_step=16
            )
        block_bytes = 2 * 2 * 16 * 4 * 4  # keys and values, 2 heads of 16, 4 tokens, float32
        return block_bytes * (2 * blocks if window is None else blocks + sliding)

    blocks = blocks_that_fit(room, arch, head_bytes=4 * arch.head_dim, config=config, window=window)
    assert used(blocks) <= room
    assert used(blocks + 1) > room or blocks == 4 * 50


def engine_architecture(window: int | None) -> Architecture:
    decoder = random_decoder(TINY, length=12, dtype=torch.float32, device=torch.device("cpu"))
    first, second = decoder.arch.layers
    return replace(decoder.arch, layers=(first, replace(second, window=window)))
