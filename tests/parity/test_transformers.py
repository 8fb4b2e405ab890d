"""The engine against transformers, float32: token for token, and logprob by logprob."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference import LLM, SamplingParams

FAMILIES = ("llama", "llama_tied_bias", "qwen2", "qwen3", "olmo2", "olmo3")
Family = Callable[[str], tuple[Path, PreTrainedModel]]
LENGTHS = (1, 2, 5, 16, 17, 32, 40)
NEW = 24


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 97, length).tolist() for length in lengths]


_GREEDY: dict[tuple[int, tuple[int, ...]], list[int]] = {}


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], count: int = NEW) -> list[int]:
    key = (id(model), tuple(prompt))
    out = _GREEDY.setdefault(key, [])
    while len(out) < count:
        out.append(int(model(torch.tensor([prompt + out])).logits[0, -1].argmax()))
    return out[:count]


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, prompt: list[int], output: list[int]) -> np.ndarray:
    logits = model(torch.tensor([prompt + output])).logits[0].float().log_softmax(-1)
    picked = logits[torch.arange(len(prompt) + len(output) - 1), torch.tensor((prompt + output)[1:], dtype=torch.long)]
    return picked.numpy()


GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logprobs(family_model: Family, name: str) -> None:
    folder, model = family_model(name)
    llm = LLM(str(folder))
    for prompt, out in zip(prompts(), llm.generate(prompts(), GREEDY), strict=True):
        sample = out.samples[0]
        assert sample.token_ids == greedy(model, prompt)
        expected = reference_logprobs(model, prompt, sample.token_ids)
        difference = np.abs(expected[len(prompt) - 1 :] - np.array(sample.raw_logprobs))
        assert difference.max() < 1e-4 and difference.mean() < 1e-5


@pytest.mark.parametrize("name", ["llama", "olmo3"])
@pytest.mark.parametrize(("chunk", "block"), [(1, 1), (3, 4), (16, 16), (2048, 4)])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunks_blocks_and_second_pass(
    family_model: Family, name: str, chunk: int, block: int, prefix_caching: bool
) -> None:
    folder, model = family_model(name)
    llm = LLM(str(folder), max_tokens_per_step=chunk, block_size=block, prefix_caching=prefix_caching, max_num_seqs=4)
    whole = LLM(str(folder)).generate(prompts(), GREEDY)
    for _ in range(2):
        for prompt, out, one in zip(prompts(), llm.generate(prompts(), GREEDY), whole, strict=True):
            assert out.samples[0].token_ids == greedy(model, prompt)
            np.testing.assert_allclose(out.samples[0].raw_logprobs, one.samples[0].raw_logprobs, atol=2e-5)
    if name == "llama":  # the window pool of so small an engine is reused at once
        assert (llm.stats()["prefix_hits"] > 0) == prefix_caching


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_logprobs_are_near(family_model: Family, name: str) -> None:
    folder, model = family_model(name)
    llm = LLM(str(folder), dtype="bfloat16", block_size=4)
    half = copy.deepcopy(model).to(torch.bfloat16)
    for prompt in prompts()[3:]:
        (found,) = llm.score([np.array(prompt)])
        exact = reference_logprobs(model, prompt, [])
        ours, theirs = np.abs(found - exact), np.abs(reference_logprobs(half, prompt, []) - exact)
        assert ours.mean() < 1.5 * theirs.mean() + 0.01, "no further from float32 than transformers in bfloat16"


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_forced_preemption(family_model: Family, name: str) -> None:
    folder, model = family_model(name)
    llm = LLM(str(folder), kv_cache_tokens=112, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, n=3)
    outs = llm.generate(prompts(), params)
    assert llm.stats()["preemptions"] > 0
    for prompt, out in zip(prompts(), outs, strict=True):
        assert [sample.token_ids for sample in out.samples] == [greedy(model, prompt)] * 3
    assert llm.stats()["kv_usage"] == 0


def test_mixed_join_and_leave(family_model: Family) -> None:
    folder, model = family_model("llama")
    llm = LLM(str(folder), max_num_seqs=3, max_tokens_per_step=11, block_size=4)
    expected, finished = {}, {}
    for step, prompt in enumerate(prompts() * 2):
        count = 1 + (step * 7) % NEW
        rid = llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        expected[rid] = greedy(model, prompt, count)
        finished.update({out.request_id: out.samples[0].token_ids for out in llm.step()})
    while llm.has_unfinished():
        finished.update({out.request_id: out.samples[0].token_ids for out in llm.step()})
    assert finished == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_score_and_prompt_logprobs(family_model: Family, name: str) -> None:
    folder, model = family_model(name)
    llm = LLM(str(folder), max_tokens_per_step=64, block_size=4)
    sequences = [np.array(prompt) for prompt in prompts() if len(prompt) > 1]
    for sequence, scores in zip(sequences, llm.score(sequences), strict=True):
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, reference_logprobs(model, sequence.tolist(), []), atol=1e-4)
    params = SamplingParams(max_tokens=2, prompt_logprobs=True, ignore_eos=True)
    for _ in range(2):  # the second pass finds the prompts in the prefix cache
        for prompt, out in zip(prompts(), llm.generate(prompts(), params), strict=True):
            assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
            assert len(out.prompt_logprobs) == len(prompt)
            np.testing.assert_allclose(out.prompt_logprobs[1:], reference_logprobs(model, prompt, []), atol=1e-4)


def test_temperature_logprobs_are_those_of_divided_logits(family_model: Family) -> None:
    folder, model = family_model("olmo2")
    prompt = prompts()[4]
    out = LLM(str(folder)).generate([prompt], SamplingParams(temperature=0.6, max_tokens=20, seed=1, ignore_eos=True))
    sample = out[0].samples[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
    rows = torch.arange(len(sample.token_ids))
    for temperature, found in ((0.6, sample.logprobs), (1.0, sample.raw_logprobs)):
        expected = (logits / temperature).log_softmax(-1)[rows, torch.tensor(sample.token_ids)]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
