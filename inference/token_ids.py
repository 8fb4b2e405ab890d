"""Token ids from outside. Compiled kernels read whatever stands at an id or a position, so they are looked at first."""

from collections.abc import Sequence

import numpy as np


def check_ids(low: int, high: int, *, vocab_size: int) -> None:
    """Of ids from `low` to `high`."""
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary [0, {vocab_size})")


def to_score(ids: Sequence[int] | np.ndarray, *, max_length: int, vocab_size: int) -> np.ndarray:
    """[T] int64"""
    array = np.asarray(ids)
    if array.ndim != 1 or not 2 <= len(array) <= max_length or array.dtype.kind not in "iu":
        raise ValueError(
            f"a sequence to score is 2 to max_model_len = {max_length} integer token ids; one is of shape "
            f"{array.shape} and {array.dtype}"
        )
    check_ids(int(array.min()), int(array.max()), vocab_size=vocab_size)
    return array.astype(np.int64)
