"""From the rewards of a group to one advantage for each sample."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

Kind = Literal["centered", "standardized", "leave_one_out"]


def advantages(rewards: Sequence[float], *, kind: Kind = "centered") -> np.ndarray:
    """[G] float32 from G rewards.

    centered: r - mean(r), as in OLMo 3. standardized: that over the population standard deviation, 0 where
    all are equal.
    leave_one_out: r minus the mean of the others.
    """
    r = np.asarray(rewards, np.float64)
    centered = r - r.mean()
    if kind == "centered":
        a = centered
    elif kind == "standardized":
        a = centered / r.std() if carries_signal(rewards) else np.zeros_like(r)
    else:
        a = centered * len(r) / (len(r) - 1)
    return a.astype(np.float32)


def carries_signal(rewards: Sequence[float]) -> bool:
    """False when all rewards are equal (or fewer than two stand): such a group has no gradient."""
    return len(rewards) >= 2 and min(rewards) != max(rewards)
