"""Schedules, decay groups and clipping."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from learner.optim import build_optimizer, gradient_norm, learning_rate, step_optimizer
from olmorl.contract.errors import ConfigError
from olmorl.contract.training import LearnerConfig

BASE = LearnerConfig(model="", lr=2.0, warmup_steps=4, total_steps=14)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", {0: 0.5, 3: 2.0, 4: 2.0, 9: 2.0, 13: 2.0, 20: 2.0}),
        ("linear", {0: 0.5, 3: 2.0, 4: 2.0, 9: 1.0, 13: 0.2, 20: 0.0}),
        ("cosine", {0: 0.5, 3: 2.0, 4: 2.0, 9: 1.0, 20: 0.0}),
    ],
)
def test_learning_rate(schedule: str, rates: dict[int, float]) -> None:
    config = replace(BASE, schedule=schedule)
    assert {v: learning_rate(config, version=v) for v in rates} == pytest.approx(rates)


def test_no_warm_up_begins_at_the_full_rate() -> None:
    assert learning_rate(replace(BASE, warmup_steps=0), version=0) == 2.0


def test_unknown_schedule() -> None:
    with pytest.raises(ConfigError, match="'cosnie'"):
        build_optimizer(nn.Linear(2, 2), replace(BASE, schedule="cosnie"))


def test_only_matrices_decay() -> None:
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, replace(BASE, weight_decay=0.5))
    before = model.bias.detach().clone(), model.weight.detach().clone()
    model.bias.grad, model.weight.grad = torch.zeros(3), torch.zeros(3, 3)
    step_optimizer(optimizer, model, lr=0.1, norm=torch.tensor(0.0), max_norm=1.0)
    torch.testing.assert_close(model.bias.detach(), before[0])
    torch.testing.assert_close(model.weight.detach(), before[1] * 0.95)


def test_gradients_are_clipped_by_their_joint_norm() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad, model.bias.grad = torch.full((2, 2), 3.0), torch.full((2,), 4.0)
    norm = gradient_norm(model)
    assert norm.item() == pytest.approx((4 * 9 + 2 * 16) ** 0.5)
    step_optimizer(build_optimizer(model, BASE), model, lr=0.0, norm=norm, max_norm=2.0)
    assert gradient_norm(model).item() == pytest.approx(2.0, rel=1e-4)
