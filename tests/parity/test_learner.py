"""The learner's logprobs equal the engine's on the same weights, every family, float32."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from inference import LLM, SamplingParams
from learner.pack import pack
from learner.trainer import Trainer
from olmorl.contract.training import LearnerConfig, ScoreRequest, TrainSample

FAMILIES = ("llama", "llama_tied_bias", "qwen2", "qwen3", "olmo2", "olmo3")
Family = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FAMILIES)
def test_scores(family_model: Family, name: str) -> None:
    folder, _ = family_model(name)
    rng = np.random.default_rng(5)
    sequences = tuple(rng.integers(0, 97, length).astype(np.int32) for length in (2, 5, 17, 40, 33))
    trainer = Trainer(LearnerConfig(model=str(folder)), device=torch.device("cpu"))
    ours = np.concatenate(trainer.score(ScoreRequest(sequences=sequences)))
    engines = np.concatenate(LLM(str(folder)).score(sequences))
    difference = np.abs(ours - engines)
    assert difference.max() < 1e-4 and difference.mean() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_group_is_trained_at_ratio_one(family_model: Family, name: str) -> None:
    """Samples of one prompt, drawn by the engine at a temperature, and recomputed with the prompt shared."""
    folder, _ = family_model(name)
    prompts = [[5, 9, 3, 44, 17], [12]]
    params = SamplingParams(n=4, max_tokens=24, temperature=0.7, ignore_eos=True, seed=1)
    samples = [
        TrainSample(
            prompt_token_ids=np.array(prompt, np.int32),
            token_ids=np.array(sample.token_ids, np.int32),
            logprobs=np.array(sample.logprobs, np.float32),
            token_versions=np.zeros(len(sample.token_ids), np.int32),
            loss_mask=np.ones(len(sample.token_ids), bool),
            advantage=1.0 - index,
        )
        for prompt, out in zip(prompts, LLM(str(folder)).generate(prompts, params), strict=True)
        for index, sample in enumerate(out.samples)
    ]
    trainer = Trainer(LearnerConfig(model=str(folder), temperature=0.7), device=torch.device("cpu"))
    (batch,) = pack(samples, version=0, num_ranks=1, tokens_per_micro_batch=1000)
    metrics = trainer.train_step(batch).metrics
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-4 and metrics["mismatch/logprob_abs_diff_mean"] < 1e-5
    assert metrics["off_policy/importance_ratio_mean"] == pytest.approx(1, abs=1e-4)
