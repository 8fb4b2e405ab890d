"""A calculator for sums: the model writes `12+9=`, the calculator goes on with `21;`.

So a chain sum is answered as without it, `12+9=21;21+3=24;24`, but what stands behind each `=` is always right. What
the model writes without a `=` at its end is its answer.
"""

import re
from typing import ClassVar

from olmorl.environments.environment import Reply

CALL = re.compile(r"(?<!\d)(\d{1,9}(?:\+\d{1,9}){1,20})=\Z")


class Calculator:
    stop: ClassVar[tuple[str, ...]] = ("=",)
    max_turns: ClassVar[int] = 12

    def __init__(self, *, prompt: str, ground_truth: object, seed: int) -> None:
        pass

    def step(self, completion: str) -> Reply:
        call = CALL.search(completion)
        if call is None:
            return Reply(None)
        return Reply(f"{sum(map(int, call[1].split('+')))};")
