"""avg@k and pass@k against what they mean: the share of subsets of k samples that hold one that passes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.metrics.pass_at_k import avg_at_k, pass_at_k

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=8)


@given(rewards=REWARDS, k=st.integers(1, 8))
def test_pass_at_k_is_the_share_of_subsets(rewards: list[float], k: int) -> None:
    found = pass_at_k([rewards], k).mean
    if k > len(rewards):
        assert math.isnan(found), "fewer samples than k say nothing"
        return
    subsets = list(itertools.combinations(rewards, k))
    assert found == pytest.approx(np.mean([max(subset) >= 1 for subset in subsets]))


def test_pass_at_k_is_unbiased() -> None:
    """From 4 samples of a policy that passes with p = 0.3, the mean estimate of pass@2 is 1 - 0.7^2; "any of the
    first two of the ones that came" has the same mean, "1 - (1 - c/n)^k" has not."""
    drawn = np.random.default_rng(0).random((20_000, 4)) < 0.3
    estimate = pass_at_k(drawn.astype(float).tolist(), 2)
    assert abs(estimate.mean - (1 - 0.7**2)) < 4 * estimate.standard_error
    biased = 1 - (1 - drawn.mean(axis=1)) ** 2
    assert abs(biased.mean() - (1 - 0.7**2)) > 4 * estimate.standard_error


def test_errors_are_those_of_the_mean_over_prompts() -> None:
    rewards = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    found = avg_at_k(rewards)
    assert found.mean == 0.5
    assert found.standard_error == pytest.approx(np.std([0.5, 1.0, 0.0, 0.5], ddof=1) / 2)
    assert pass_at_k(rewards, 2).standard_error == pytest.approx(np.std([1, 1, 0, 1], ddof=1) / 2)
    assert math.isnan(avg_at_k([[1.0]]).standard_error), "one prompt says nothing of others"
    assert math.isnan(avg_at_k([[], []]).mean) and avg_at_k([[], [1.0]]).mean == 1.0
