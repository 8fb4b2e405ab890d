"""Two ranks over gloo, each with its part of the model, draw what one draws: for each family, and across an update."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from inference import LLM, SamplingParams
from olmorl.contract.errors import ConfigError, WorkerError

PROMPTS = [[5, 60, 2, 11], [3, 10, 4, 10, 5, 11, 96, 0, 1, 1, 1, 2, 17], [9] * 21, [0]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(seed=3, n=3, max_tokens=20, logprobs=2),
    SamplingParams(seed=4, max_tokens=24, top_k=9, repetition_penalty=1.3, prompt_logprobs=True),
    SamplingParams(seed=5, n=2, max_tokens=30),
]
OPTIONS: dict[str, Any] = {"block_size": 4, "max_tokens_per_step": 16, "threads": 1, "max_num_seqs": 5}
Family = Callable[[str], Any]


def moved(llm: LLM) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = llm.engine.decoder.tensors.items()
    return {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in tensors}


def compare(many: LLM, one: LLM) -> None:
    """Token for token and, to rounding, in every logprob."""
    for a, b in zip(many.generate(PROMPTS, PARAMS), one.generate(PROMPTS, PARAMS), strict=True):
        if b.prompt_logprobs is not None:
            np.testing.assert_allclose(a.prompt_logprobs[1:], b.prompt_logprobs[1:], atol=1e-4)  # type: ignore[index]
        for x, y in zip(a.samples, b.samples, strict=True):
            assert x.token_ids == y.token_ids and x.finish_reason == y.finish_reason
            assert x.version_spans == y.version_spans
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)
    sequences = [np.array(prompt * 2) for prompt in PROMPTS]
    for x_T, y_T in zip(many.score(sequences), one.score(sequences), strict=True):
        np.testing.assert_allclose(x_T, y_T, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama_tied_bias", "qwen2", "qwen3", "olmo2", "olmo3"])
def test_two_ranks_draw_what_one_draws(family_model: Family, family: str) -> None:
    folder, _ = family_model(family)
    one = LLM(str(folder), **OPTIONS)
    many = LLM(str(folder), tensor_parallel_size=2, **OPTIONS)
    compare(many, one)
    print(many.stats())
