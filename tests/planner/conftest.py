"""A small set-up that every part of the planner can be tried on in milliseconds, and rows of a run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olmorl.metrics.rollout_log import RolloutRow
from olmorl.planner.costs import Device, EngineCost, LearnerCost, SyncCost
from olmorl.planner.load import Load, lognormal_lengths
from olmorl.planner.setup import Setup
from olmorl.planner.shape import ModelShape

SHAPE = ModelShape(
    name="small", num_layers=4, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=512, tied=True,
)  # fmt: skip
DEVICE = Device(name="small", flops=1e9, bandwidth=1e9, memory=1e9)


@pytest.fixture
def make_setup() -> Callable[..., Setup]:
    def make(**changes: Any) -> Setup:
        settings: dict[str, Any] = {
            "load": Load(lengths=lognormal_lengths(40, 90), prompt_tokens=12, zero_variance=0.4),
            "engine": EngineCost(shape=SHAPE, device=DEVICE, step_overhead=1e-4),
            "learner": LearnerCost(shape=SHAPE, device=DEVICE, ranks=1, step_overhead=0.05),
            "sync": SyncCost(shape=SHAPE, bandwidth=1e7, latency=0.01, snapshot=0.01, swap=1e-4),
            "inference_workers": 2,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_num_seqs": 8,
            "kv_cache_tokens": 4096,
            "seed": 1,
        }
        return Setup(**settings | changes)

    return make


ROW = RolloutRow(
    rollout_id="", prompt_id="", sample=0, step=1, attempt=0, data_source="s",
    prompt_token_ids=np.zeros(7, np.int32), token_ids=np.zeros(1, np.int32), loss_mask=np.ones(1, bool),
    logprobs=np.zeros(1, np.float32), raw_logprobs=np.zeros(1, np.float32), version_spans=((0, 0, 1),), kv_events=(),
    text="", finish_reason="length", reward=1.0, verdict="scored", advantage=0.0, fate="trained", seed=0, worker="w",
    t_admitted=0.0, t_first_token=0.0, t_finished=0.0, t_trained=0.0, prompt="", ground_truth="", verdict_detail="",
)  # fmt: skip


@pytest.fixture
def row() -> Callable[..., RolloutRow]:
    return _row


def _row(prompt_id: str, sample: int, length: int, t_admitted: float, fate: str = "trained") -> RolloutRow:
    tokens = np.zeros(length, np.int32)
    return replace(
        ROW, prompt_id=prompt_id, sample=sample, token_ids=tokens, loss_mask=np.ones(length, bool),
        logprobs=np.zeros(length, np.float32), raw_logprobs=np.zeros(length, np.float32), fate=fate,
        t_admitted=t_admitted, version_spans=((0, 0, length),),
    )  # fmt: skip
