"""The objective and every switch of it against plain loops written from the formula."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.loss import PolicyLoss, TokenBatch, check_objective, policy_loss
from olmorl.contract.errors import ConfigError
from olmorl.contract.training import LearnerConfig

finite = st.floats(-6, 0)
# current, old, behaviour, reference logprob; advantage; sample
token = st.tuples(finite, finite, finite, finite, st.floats(-2, 2), st.integers(0, 3))
tokens = st.lists(token, min_size=1, max_size=20)
BASE = LearnerConfig(model="", clip_low=0.2, clip_high=0.272, importance_cap=2.0)


def loss_of(rows: list, config: LearnerConfig) -> tuple[PolicyLoss, list[float]]:
    """The loss, and the gradient of its sum by each current logprob."""
    current, old, behaviour, reference, advantage = (
        torch.tensor(column, dtype=torch.float64) for column in list(zip(*rows, strict=True))[:5]
    )
    current.requires_grad_(True)
    sample = torch.tensor([row[5] for row in rows])
    loss = policy_loss(current, TokenBatch(old, behaviour, advantage, sample, reference), config=config)
    (gradient,) = torch.autograd.grad(loss.loss_R.sum(), current)
    return loss, gradient.tolist()


def rho_by_hand(old: float, behaviour: float) -> float:
    return min(math.exp(old - behaviour), 2.0)


def clipped_gain(q: float, advantage: float) -> tuple[float, float]:
    """min(q A, clip(q) A), and its derivative by log q."""
    free, bounded = q * advantage, min(max(q, 0.8), 1.272) * advantage
    return (free, free) if free <= bounded else (bounded, 0.0)


def near_a_kink(rows: list) -> bool:
    """Where a derivative jumps, a last bit decides which side is taken."""
    return any(abs(math.exp(row[0] - row[1]) - edge) < 1e-6 for row in rows for edge in (0.8, 1.272))


@settings(deadline=None)
@given(tokens)
def test_grpo(rows: list) -> None:
    loss, gradient = loss_of(rows, BASE)
    values, slopes = [], []
    for current, old, behaviour, _, advantage, _ in rows:
        rho = rho_by_hand(old, behaviour)
        gain, slope = clipped_gain(math.exp(current - old), advantage)
        values.append(-rho * gain)
        slopes.append(-rho * slope)
    assert loss.loss_R.tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    assert loss.importance_R.tolist() == pytest.approx([math.exp(o - b) for _, o, b, *_ in rows])
    assert loss.rho_R.tolist() == pytest.approx([rho_by_hand(o, b) for _, o, b, *_ in rows])
    assert loss.kl_R is None
    if not near_a_kink(rows):
        assert gradient == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(tokens)
def test_gspo(rows: list) -> None:
    loss, gradient = loss_of(rows, replace(BASE, objective="gspo"))
    values, slopes = [0.0] * len(rows), [0.0] * len(rows)
    for sample in {row[5] for row in rows}:
        members = [i for i, row in enumerate(rows) if row[5] == sample]
        ratio = math.exp(sum(rows[i][0] - rows[i][1] for i in members) / len(members))
        if min(abs(ratio - 0.8), abs(ratio - 1.272)) < 1e-6:
            return
        for i in members:
            _, old, behaviour, _, advantage, _ = rows[i]
            gain, slope = clipped_gain(ratio, advantage)
            values[i] = -rho_by_hand(old, behaviour) * gain
            for j in members:  # every token of the sample moves the ratio that token i is weighted with
                slopes[j] -= rho_by_hand(old, behaviour) * slope / len(members)
    assert loss.loss_R.tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(tokens)
def test_cispo(rows: list) -> None:
    loss, gradient = loss_of(rows, replace(BASE, objective="cispo"))
    weights = [rho_by_hand(o, b) * min(math.exp(c - o), 1.272) * a for c, o, b, _, a, _ in rows]
    assert loss.loss_R.tolist() == pytest.approx([-w * row[0] for w, row in zip(weights, rows, strict=True)])
    assert gradient == pytest.approx([-w for w in weights])
    if not near_a_kink(rows):
        assert loss.clipped_R.tolist() == [math.exp(c - o) > 1.272 for c, o, *_ in rows]


@settings(deadline=None)
@given(tokens)
def test_icepop(rows: list) -> None:
    ratios = [math.exp(o - b) for _, o, b, *_ in rows]
    if any(min(abs(r - 0.5), abs(r - 1.5)) < 1e-6 for r in ratios):
        return
    plain, _ = loss_of(rows, BASE)
    banded, gradient = loss_of(rows, replace(BASE, importance_band=(0.5, 1.5)))
    inside = [0.5 <= r <= 1.5 for r in ratios]
    expected = [x if keep else 0.0 for x, keep in zip(plain.loss_R.tolist(), inside, strict=True)]
    assert banded.loss_R.tolist() == pytest.approx(expected, abs=1e-12)
    assert all(g == 0 for g, keep in zip(gradient, inside, strict=True) if not keep)
    assert [r > 0 for r in banded.rho_R.tolist()] == inside


@settings(deadline=None)
@given(tokens, st.sampled_from(["k1", "k2", "k3"]))
def test_kl(rows: list, estimator: str) -> None:
    plain, plain_gradient = loss_of(rows, BASE)
    loss, gradient = loss_of(rows, replace(BASE, kl_beta=0.3, kl_estimator=estimator))
    d = [row[0] - row[3] for row in rows]
    kl = {
        "k1": d,
        "k2": [x * x / 2 for x in d],
        "k3": [math.exp(-x) - 1 + x for x in d],
    }[estimator]
    slope = {"k1": [1.0] * len(d), "k2": d, "k3": [1 - math.exp(-x) for x in d]}[estimator]
    assert loss.kl_R is not None and loss.kl_R.tolist() == pytest.approx(kl, abs=1e-9)
    expected = [x + 0.3 * k for x, k in zip(plain.loss_R.tolist(), kl, strict=True)]
    assert loss.loss_R.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    expected = [g + 0.3 * s for g, s in zip(plain_gradient, slope, strict=True)]
    assert gradient == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_unknown_switches_are_refused() -> None:
    check_objective(BASE)
    with pytest.raises(ConfigError, match="'ppo'; it must be one of grpo, gspo, cispo"):
        check_objective(replace(BASE, objective="ppo"))
    with pytest.raises(ConfigError, match="'k4'"):
        check_objective(replace(BASE, kl_estimator="k4"))


def one(current: float, old: float, behaviour: float, advantage: float) -> tuple[float, bool]:
    """Gradient by the current logprob, and whether the clip was in force."""
    loss, (gradient,) = loss_of([(current, old, behaviour, 0.0, advantage, 0)], BASE)
    return gradient, bool(loss.clipped_R.item())


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


@pytest.mark.parametrize("objective", ["grpo", "gspo", "cispo"])
def test_masked_tokens_are_not_our_business(objective: str) -> None:
    empty = torch.zeros(0)
    nothing = TokenBatch(empty, empty, empty, torch.zeros(0, dtype=torch.int64), empty)
    loss = policy_loss(empty, nothing, config=replace(BASE, objective=objective, kl_beta=0.1))
    assert loss.loss_R.sum() == 0
