"""The objective against plain loops written from the formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.loss import policy_loss

finite = st.floats(-6, 0)
token = st.tuples(finite, finite, finite, st.floats(-2, 2))  # current, old, behaviour logprob; advantage
SETTINGS = {"clip_low": 0.2, "clip_high": 0.272, "importance_cap": 2.0}


def by_hand(current: float, old: float, behaviour: float, advantage: float) -> float:
    q = math.exp(current - old)
    rho = min(math.exp(old - behaviour), 2.0)
    return -rho * min(q * advantage, min(max(q, 0.8), 1.272) * advantage)


@settings(deadline=None)
@given(st.lists(token, min_size=1, max_size=20))
def test_value(tokens: list) -> None:
    current, old, behaviour, advantage = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    loss = policy_loss(current, old_logprobs_R=old, behaviour_logprobs_R=behaviour, advantages_R=advantage, **SETTINGS)
    assert loss.loss_R.tolist() == pytest.approx([by_hand(*t) for t in tokens], rel=1e-9, abs=1e-12)
    ratios = [math.exp(o - b) for _, o, b, _ in tokens]
    assert loss.importance_R.tolist() == pytest.approx(ratios)


def one(current: float, old: float, behaviour: float, advantage: float) -> tuple[float, bool]:
    """Gradient by the current logprob, and whether the clip was in force."""
    logprobs_R = torch.tensor([current], requires_grad=True)
    loss = policy_loss(
        logprobs_R,
        old_logprobs_R=torch.tensor([old]),
        behaviour_logprobs_R=torch.tensor([behaviour]),
        advantages_R=torch.tensor([advantage]),
        **SETTINGS,
    )
    (gradient,) = torch.autograd.grad(loss.loss_R.sum(), logprobs_R)
    return gradient.item(), bool(loss.clipped_R.item())


def test_on_policy_gradient_is_that_of_the_logprob() -> None:
    assert one(-1.0, -1.0, -1.0, 1.5) == (pytest.approx(-1.5), False)
    assert one(-1.0, -1.0, -1.0, -1.5) == (pytest.approx(1.5), False)


def test_the_correction_is_capped_and_constant() -> None:
    assert one(-1.0, -1.0, -1.5, 1.0)[0] == pytest.approx(-math.exp(0.5))
    assert one(-1.0, -1.0, -4.0, 1.0)[0] == pytest.approx(-2.0)


def test_the_clip_stops_only_moves_further_away() -> None:
    assert one(-0.5, -1.0, -1.0, 1.0) == (0.0, True)  # q = 1.65, the advantage asks for more
    assert one(-0.5, -1.0, -1.0, -1.0) == (pytest.approx(math.exp(0.5)), False)
    assert one(-1.5, -1.0, -1.0, -1.0) == (0.0, True)  # q = 0.61, the advantage asks for less
    assert one(-0.78, -1.0, -1.0, 1.0)[1] is False  # q = 1.246: within clip_high, beyond clip_low's mirror


def test_extreme_differences_stay_finite() -> None:
    assert one(-1.0, -1.0, -500.0, 1.0)[0] == pytest.approx(-2.0)
    assert one(-1.0, -1.0, 500.0, 1.0)[0] == pytest.approx(0.0, abs=1e-8)


def test_masked_tokens_are_not_our_business() -> None:
    empty = torch.zeros(0)
    loss = policy_loss(empty, old_logprobs_R=empty, behaviour_logprobs_R=empty, advantages_R=empty, **SETTINGS)
    assert loss.loss_R.sum() == 0
