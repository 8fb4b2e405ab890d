"""A step whose tokens are drawn on the device, and what becomes of them once the host reads their ids.

The plain loop reads them at once. With overlap the next step is launched first, so that the device never waits for the
host; what has stopped is then known one step late, and the token it drew in between is thrown away here, unseen.

Where a sequence brought a draft there is one draw behind each token of it. The first draw counts in any case; each
further one as long as the token it was drawn behind is the one that was drawn there.
"""

import time
from dataclasses import dataclass, field

import torch

from inference.request import Sequence
from inference.sampler import Sampled
from inference.stopping import finish_reason


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of a draft."""

    sequence: Sequence
    drafted: int
    accepted: int


@dataclass(slots=True)
class Landed:
    finished: list[Sequence] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    num_tokens: int = 0
    """tokens that were appended to a sequence"""
    num_wasted: int = 0
    """draws of sequences that had ended before"""


class Flight:
    def __init__(self, drawing: list[Sequence], sampled: Sampled, version: int) -> None:
        """`sampled`: a row for the next token of each sequence and behind each token of its draft, which ends here."""
        self.drawing = drawing
        self.token_ids_R = sampled.token_ids_R
        """on the device: the next step's input"""
        self._version = version
        self._sampled = sampled.to_host()
        self._drafts: list[list[int]] = []
        self._copied: torch.cuda.Event | None = None
        if sampled.token_ids_R.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        row = 0
        for sequence in drawing:
            sequence.in_flight += 1
            sequence.drawn_row = row
            row += 1 + len(sequence.draft)
            self._drafts.append(sequence.draft)
            sequence.draft = []

    def land(self) -> Landed:
        """Append each token to its sequence and judge whether that ends it."""
        if self._copied is not None:
            self._copied.synchronize()
        sampled, landed, now = self._sampled, Landed(), time.time()
        rows = list(
            zip(
                sampled.token_ids_R.tolist(),
                sampled.logprobs_R.tolist(),
                sampled.raw_logprobs_R.tolist(),
                sampled.broken_R.tolist(),
                strict=True,
            )
        )
        first = 0
        for sequence, draft in zip(self.drawing, self._drafts, strict=True):
            if sequence.finish_reason is not None:
                landed.num_wasted += 1
            else:
                sequence.in_flight -= 1
                self._take(sequence, draft, rows, first, landed, now)
            first += 1 + len(draft)
        return landed

    def _take(
        self,
        sequence: Sequence,
        draft: list[int],
        rows: list[tuple[int, float, float, bool]],
        first: int,
        landed: Landed,
        now: float,
    ) -> None:
        accepted = 0
        for row in range(first, first + 1 + len(draft)):
            token, logprob, raw, broken = rows[row]
            if broken:
                sequence.finish_reason = "abort"
                sequence.error = f"the logits of output token {sequence.num_output} are not finite"
                break
            landed.num_tokens += 1
            self._append(sequence, token, logprob, raw, now)
            if row in self._sampled.top:
                ids_K, logprobs_K = self._sampled.top[row]
                sequence.top_logprobs.append(list(zip(ids_K.tolist(), logprobs_K.tolist(), strict=True)))
            sequence.finish_reason = finish_reason(sequence)
            right = draft[row - first : row - first + 1] == [token]
            accepted += right
            if sequence.finish_reason is not None or not right:
                break
        if draft:
            landed.verified.append(Verified(sequence, len(draft), accepted))
        if sequence.finish_reason is not None:
            sequence.in_flight = 0
            landed.finished.append(sequence)

    def _append(self, sequence: Sequence, token: int, logprob: float, raw: float, now: float) -> None:
        if not sequence.logprobs:
            sequence.t_first_token = now
        if not sequence.span_starts or sequence.span_starts[-1][0] != self._version:
            sequence.span_starts.append((self._version, len(sequence.logprobs)))
        sequence.token_ids.append(token)
        sequence.logprobs.append(logprob)
        sequence.raw_logprobs.append(raw)
