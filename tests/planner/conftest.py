"""A small set-up that every part of the planner can be tried on in milliseconds."""

from collections.abc import Callable
from typing import Any

import pytest

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
