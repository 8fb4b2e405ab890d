"""How often each token stands in the sequences that have a penalty, on the device, a row for each slot that needs one.

The draw counts what it draws, so a step uploads nothing; whatever the host knows and the counts do not (a sequence
that entered or was preempted, a token that was not taken over) is made good here.

Suffixes: R rows of a step, C rows of counts, V vocabulary.
"""

import numpy as np
import torch

from inference.request import Sequence

IN_PROMPT = 1 << 30
"""added to a count when the token stands in the prompt; below it the count is of the output"""


class PenaltyCounts:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts_CV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._row_of_slot: dict[int, int] = {}
        self._counted: dict[int, tuple[Sequence, int]] = {}
        """by slot: whose tokens its row counts, and how many of them"""

    def rows(
        self, penalized: list[tuple[int, Sequence, int]], num_rows: int, drawn_ids: torch.Tensor | None = None
    ) -> np.ndarray:
        """[R] int32: where each row of a step is counted, -1 without penalty. One more token is expected of each.

        `drawn_ids`, on the device, hold the tokens that are in flight.
        """
        rows_R = np.full(num_rows, -1, np.int32)
        for row, sequence, ahead in penalized:
            assert ahead == 0, "a draw is counted at once: behind a draft nothing may be drawn"
            rows_R[row] = index = self._row(sequence.row)
            known, count = self._counted.get(sequence.row, (None, 0))
            if known is not sequence or count > sequence.num_tokens:
                self.counts_CV[index] = 0
                self._add(index, sorted(set(sequence.token_ids[: sequence.num_prompt])), IN_PROMPT)
                count = sequence.num_prompt
            if count < sequence.num_tokens:
                self._add(index, sequence.token_ids[count:], 1)
                if sequence.in_flight:
                    assert drawn_ids is not None
                    self.counts_CV[index].index_add_(0, drawn_ids[sequence.drawn_row, None], self._one)
            self._counted[sequence.row] = sequence, sequence.num_tokens + 1
        return rows_R

    def _row(self, slot: int) -> int:
        index = self._row_of_slot.setdefault(slot, len(self._row_of_slot))
        missing = index + 1 - len(self.counts_CV)
        if missing > 0:
            more = self.counts_CV.new_zeros((max(missing, len(self.counts_CV)), self.counts_CV.shape[1]))
            self.counts_CV = torch.cat([self.counts_CV, more])
        return index

    def _add(self, index: int, ids: list[int], amount: int) -> None:
        if ids:
            found, counts = np.unique(ids, return_counts=True)
            device = self.counts_CV.device
            self.counts_CV[index, torch.from_numpy(found).to(device)] += torch.from_numpy(
                (amount * counts).astype(np.int32)
            ).to(device)
