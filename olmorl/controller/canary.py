"""The canary: fixed sequences that learner and engine score after every update, to show that both hold one model."""

from collections.abc import Iterable

import numpy as np

from olmorl.contract.training import ScoreRequest


def canary_sequences(prompts: Iterable[np.ndarray], *, count: int, length: int) -> ScoreRequest | None:
    """`count` sequences of `length` tokens, cut from the prompts' tokens laid end to end (repeated if too few)."""
    if count == 0:
        return None
    tokens = np.concatenate(list(prompts))
    rows = np.resize(tokens, (count, length))
    return ScoreRequest(sequences=tuple(np.ascontiguousarray(row) for row in rows))
