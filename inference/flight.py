"""A step whose tokens are drawn on the device, and what becomes of them once the host reads their ids.

The plain loop reads them at once. With overlap the next step is launched first, so that the device never waits for the
host; what has stopped is then known one step late, and the token it drew in between is thrown away here, unseen.
"""

import time
from dataclasses import dataclass

import torch

from inference.request import Sequence
from inference.sampler import Sampled
from inference.stopping import finish_reason


@dataclass(frozen=True, slots=True)
class Landed:
    finished: list[Sequence]
    num_tokens: int
    """tokens that were appended to a sequence"""
    num_wasted: int
    """tokens of sequences that had ended before"""


class Flight:
    def __init__(self, drawing: list[Sequence], sampled: Sampled, version: int) -> None:
        """Row r of what was `sampled` is the next token of `drawing[r]`, by the weights of `version`."""
        self.drawing = drawing
        self.token_ids_R = sampled.token_ids_R
        """on the device: the next step's input"""
        self._version = version
        self._sampled = sampled.to_host()
        self._copied: torch.cuda.Event | None = None
        if sampled.token_ids_R.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        for row, sequence in enumerate(drawing):
            sequence.in_flight += 1
            sequence.drawn_row = row

    def land(self) -> Landed:
        """Append each token to its sequence and judge whether that ends it."""
        if self._copied is not None:
            self._copied.synchronize()
        sampled, now = self._sampled, time.time()
        finished: list[Sequence] = []
        appended = 0
        rows = zip(
            self.drawing,
            sampled.token_ids_R.tolist(),
            sampled.logprobs_R.tolist(),
            sampled.raw_logprobs_R.tolist(),
            sampled.broken_R.tolist(),
            strict=True,
        )
        for row, (sequence, token, logprob, raw, broken) in enumerate(rows):
            if sequence.finish_reason is not None:
                continue
            sequence.in_flight -= 1
            if broken:
                sequence.finish_reason = "abort"
                sequence.error = f"the logits of output token {sequence.num_output} are not finite"
            else:
                appended += 1
                self._append(sequence, token, logprob, raw, now)
                if row in sampled.top:
                    ids_K, logprobs_K = sampled.top[row]
                    sequence.top_logprobs.append(list(zip(ids_K.tolist(), logprobs_K.tolist(), strict=True)))
                sequence.finish_reason = finish_reason(sequence)
            if sequence.finish_reason is not None:
                sequence.in_flight = 0
                finished.append(sequence)
        broken_rows = sum(sequence.error is not None for sequence in finished)
        return Landed(finished, appended, len(self.drawing) - appended - broken_rows)

    def _append(self, sequence: Sequence, token: int, logprob: float, raw: float, now: float) -> None:
        if not sequence.logprobs:
            sequence.t_first_token = now
        if not sequence.span_starts or sequence.span_starts[-1][0] != self._version:
            sequence.span_starts.append((self._version, len(sequence.logprobs)))
        sequence.token_ids.append(token)
        sequence.logprobs.append(logprob)
        sequence.raw_logprobs.append(raw)
