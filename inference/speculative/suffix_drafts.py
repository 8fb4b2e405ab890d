"""Drafts without weights: a sample's own text and those of all samples of its prompt, finished or not, say what may
come next. No torch here.
"""

from array import array
from dataclasses import dataclass, field

from inference.request import Request, Sequence
from inference.speculative.acceptance import Acceptance
from inference.speculative.speculation import Speculation
from inference.speculative.suffix_index import MOST_TOKENS, SuffixIndex

_LEAST = 0.2  # probability below which a guess is not worth its place in a step
_KEPT_TOKENS = 1 << 17  # of texts of prompts that nobody works on


@dataclass(slots=True)
class _Drafting:
    """What is known of one sample."""

    index: SuffixIndex
    text: int
    """its number there"""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(least=_LEAST))
    matched: int = 0
    """of the draft that is being judged"""


@dataclass(slots=True)
class _PromptTexts:
    index: SuffixIndex
    open_requests: int = 0
    num_tokens: int = 0
    """of the texts of requests that are closed"""


class SuffixDrafts(Speculation):
    def __init__(self, *, max_draft: int, step_tokens: int) -> None:
        super().__init__(max_draft=max_draft, step_tokens=step_tokens)
        self._open: dict[bytes, _PromptTexts] = {}
        """by prompt"""
        self._idle: dict[bytes, _PromptTexts] = {}
        """of prompts that nobody works on; the one that was closed last comes last"""
        self._idle_tokens = 0

    def open(self, request: Request) -> None:
        key = _key(request)
        if key not in self._open:
            new = _PromptTexts(SuffixIndex(len(request.prompt)))
            self._open[key] = self._idle.pop(key, new)
            self._idle_tokens -= self._open[key].num_tokens
        texts = self._open[key]
        texts.open_requests += 1
        if texts.num_tokens >= MOST_TOKENS:  # a prompt that is asked again and again
            texts.index, texts.num_tokens = SuffixIndex(len(request.prompt)), 0
        for sequence in request.sequences:
            sequence.drafting = _Drafting(texts.index, texts.index.add(sequence.token_ids))

    def close(self, request: Request) -> None:
        """Its texts stay for a while."""
        super().close(request)
        key = _key(request)
        texts = self._open[key]
        texts.open_requests -= 1
        texts.num_tokens += sum(len(sequence.token_ids) for sequence in request.sequences)
        if not texts.open_requests:
            self._idle[key] = self._open.pop(key)
            self._idle_tokens += texts.num_tokens
        while self._idle_tokens > _KEPT_TOKENS:
            self._idle_tokens -= self._idle.pop(next(iter(self._idle))).num_tokens

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        drafting: _Drafting = sequence.drafting
        draft, drafting.matched = drafting.index.continuation(drafting.text, most)
        return draft[: drafting.acceptance.length(drafting.matched, len(draft))] if draft else []

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        drafting: _Drafting = sequence.drafting
        drafting.acceptance.observe(drafting.matched, drafted, accepted)


def _key(request: Request) -> bytes:
    return array("i", request.prompt).tobytes()
