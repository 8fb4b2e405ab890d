"""What the calculator takes for a question."""

import pytest

from olmorl.environments import Reply
from olmorl.environments.calculator import Calculator


@pytest.mark.parametrize(
    ("turn", "observation"),
    [
        ("12+9=", "21;"),
        ("21;21+3=", "24;"),
        ("1+2+3=", "6;"),
        ("24", None),
        ("12+9", None),
        ("12=", None),
        ("+9=", None),
        ("12+9=21", None),
        ("", None),
        (f"{'9' * 40}+1=", None),  # no number that a sum would need
    ],
)
def test_a_sum_with_an_equals_sign_at_its_end(turn: str, observation: str | None) -> None:
    calculator = Calculator(prompt="12+9+3=", ground_truth="24", seed=0)
    assert calculator.step(turn) == Reply(observation)
