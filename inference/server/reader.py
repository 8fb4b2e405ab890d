"""What is new of a sample since it was last looked at: all at once when it is finished, or piece by piece before.

Pieces joined are the whole: a piece never holds text that a stop string may still take back, half a character, or the
EOS and stop ids that are no text.
"""

from dataclasses import dataclass

from inference.server.generation import Generation
from inference.stopping import TextFollower, output_text
from inference.tokenizer import Tokenizer
from olmorl.contract.generation import FinishReason, VersionSpan


@dataclass(frozen=True, slots=True)
class Piece:
    token_ids: list[int]
    logprobs: list[float]
    """of the distribution drawn from"""
    raw_logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    text: str
    finish_reason: FinishReason | None
    error: str | None
    version_spans: tuple[VersionSpan, ...]
    """of the whole sample, once it is finished"""


class SampleReader:
    def __init__(self, generation: Generation, index: int, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._index = index
        self._tokenizer = tokenizer if tokenizer.exists else None
        self._held_back = max(map(len, generation.params.stop), default=1) - 1
        self._follower: TextFollower | None = None
        self._ids: list[int] = []
        self._num_sent = 0  # characters
        self.finished = False

    def read(self) -> Piece | None:
        """None when there is nothing new."""
        generation = self._generation
        if self.finished or not generation.sequences:
            return None
        sequence, begin = generation.sequences[self._index], len(self._ids)
        self.finished = self._index in generation.ended
        if self.finished:
            end = len(sequence.raw_logprobs)
        else:
            end = generation.ready[self._index] if generation.ready else 0
            if end == begin:
                return None
        new = sequence.token_ids[sequence.num_prompt + begin : sequence.num_prompt + end]
        self._ids += new
        text = ""
        if self._tokenizer is not None:
            whole = output_text(sequence, self._tokenizer) if self.finished else self._certain_text(self._tokenizer)
            text = whole[self._num_sent :]
            self._num_sent += len(text)
        return Piece(
            new,
            sequence.logprobs[begin:end],
            sequence.raw_logprobs[begin:end],
            sequence.top_logprobs[begin:end],
            text,
            sequence.finish_reason if self.finished else None,
            sequence.error,
            sequence.version_spans if self.finished else (),
        )

    def _certain_text(self, tokenizer: Tokenizer) -> str:
        if self._follower is None:
            self._follower = TextFollower(tokenizer, num_prompt=0)
        self._follower.follow(self._ids)
        text = self._follower.text
        return text[: max(0, len(text) - self._held_back)]
