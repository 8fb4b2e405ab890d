"""Two ranks over gloo, each with its part of the model, draw what one draws: for each family, and across an update."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inference import LLM, SamplingParams
from inference.llm import RequestOutput

PROMPTS = [[5, 60, 2, 11], [3, 10, 4, 10, 5, 11, 96, 0, 1, 1, 1, 2, 17], [9] * 21, [0]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(seed=3, n=3, max_tokens=20, logprobs=2),
    SamplingParams(seed=4, max_tokens=24, top_k=9, repetition_penalty=1.3, prompt_logprobs=True),
    SamplingParams(seed=5, n=2, max_tokens=30),
]
OPTIONS: dict[str, Any] = {"block_size": 4, "max_tokens_per_step": 16, "max_num_seqs": 8, "threads": 1}
Family = Callable[[str], Any]


def moved(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def history(llm: LLM, updates: list[dict[str, torch.Tensor]]) -> Iterator[RequestOutput]:
    """Updates arrive while samples are half done, the first with their KV kept, the second not."""
    ids = [llm.add_request(*one) for one in zip(PROMPTS, PARAMS, strict=True)]
    done: dict[str, RequestOutput] = {}
    for version, update in enumerate(updates, start=1):
        for _ in range(12):
            done.update({out.request_id: out for out in llm.step()})
        llm.update_weights(update.items(), version, kv="keep" if version == 1 else "recompute")
    while llm.has_unfinished():
        done.update({out.request_id: out for out in llm.step()})
    return (done[request_id] for request_id in ids)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama_tied_bias", {"overlap": True}),
        ("qwen2", {"cuda_graphs": True}),
        ("qwen3", {}),
        ("olmo2", {"overlap": True}),
        ("olmo3", {"overlap": True, "cuda_graphs": True}),
    ],
)
def test_two_ranks_draw_what_one_draws(family_model: Family, family: str, options: dict[str, Any]) -> None:
    folder, _ = family_model(family)
    one = LLM(str(folder), **OPTIONS)
    two = LLM(str(folder), tensor_parallel_size=2, **OPTIONS, **options)
    assert two.weights_checksum() == one.weights_checksum(), "of what the ranks hold together"
    updates = [moved(one.engine.decoder.tensors, seed) for seed in (1, 2)]
    # A slot that overlap holds one step longer would move admissions against updates; there is room for all.
    for found, expected in zip(history(two, updates), history(one, updates), strict=True):
        if expected.prompt_logprobs is not None and found.prompt_logprobs is not None:
            np.testing.assert_allclose(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], atol=1e-4)
        for a, b in zip(found.samples, expected.samples, strict=True):
            assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
            assert a.version_spans == b.version_spans and len(b.version_spans) > 1
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
            np.testing.assert_allclose(a.raw_logprobs, b.raw_logprobs, atol=1e-4)
    sequences = [np.array(prompt * 2) for prompt in PROMPTS]
    for x_T, y_T in zip(two.score(sequences), one.score(sequences), strict=True):
        np.testing.assert_allclose(x_T, y_T, atol=1e-4)
    assert two.weights_checksum() == one.weights_checksum() and two.engine.version == 2
