"""What the run knows of a prompt: once for the data set, once for every time it is served."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedExample:
    """One row, rendered and tokenised. P tokens."""

    index: int
    """row number over all files, also counting rows that were too long"""
    token_ids: np.ndarray  # [P] int32
    text: str
    """what the model reads, special tokens included"""
    ground_truth: object
    data_source: str
    verifier: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(EncodedExample):
    """One occurrence of a row in the stream; (epoch, position) alone finds it again."""

    epoch: int
    position: int
    """place in the epoch's order"""

    @property
    def prompt_id(self) -> str:
        return f"{self.epoch}_{self.index}"
