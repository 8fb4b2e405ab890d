import numpy as np
import pytest

from olmorl.controller.advantage import advantages, carries_signal


def test_centered_subtracts_the_mean() -> None:
    np.testing.assert_allclose(advantages([1, 0, 0, 1, 1]), [0.4, -0.6, -0.6, 0.4, 0.4], rtol=1e-6)


def test_standardized_divides_by_the_population_deviation() -> None:
    np.testing.assert_allclose(advantages([1, 0, 0, 1], kind="standardized"), [1, -1, -1, 1])
    assert advantages([1, 1], kind="standardized").tolist() == [0, 0]
    assert advantages([0.1] * 3, kind="standardized").tolist() == [0, 0, 0], "whose mean is not 0.1"


def test_leave_one_out_compares_with_the_others() -> None:
    np.testing.assert_allclose(advantages([3, 0, 0], kind="leave_one_out"), [3, -1.5, -1.5])


@pytest.mark.parametrize(
    "rewards, signal", [([1, 1], False), ([0, 0, 0], False), ([1], False), ([], False), ([0, 1], True)]
)
def test_signal_needs_two_different_rewards(rewards: list[float], signal: bool) -> None:
    assert carries_signal(rewards) is signal
