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
_KEPT_TOKENS = 1 << 17  # in the indices of prompts that nobody works on


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
    index: SuffixIndex = field(default_factory=SuffixIndex)
    open_requests: int = 0


class SuffixDrafts(Speculation):
    def __init__(self, *, max_draft: int, step_tokens: int) -> None:
        super().__init__(max_draft=max_draft, step_tokens=step_tokens)
        self._texts: dict[bytes, _PromptTexts] = {}
        """by prompt; the one that was closed last comes last"""

    def open(self, request: Request) -> None:
        texts = self._texts.setdefault(_key(request), _PromptTexts())
        texts.open_requests += 1
        if texts.index.num_indexed >= MOST_TOKENS:  # a prompt that is asked again and again
            texts.index = SuffixIndex()
        for sequence in request.sequences:
            sequence.drafting = _Drafting(texts.index, texts.index.add(sequence.token_ids))

    def close(self, request: Request) -> None:
        """Its texts stay for a while."""
        super().close(request)
        key = _key(request)
        texts = self._texts.pop(key)
        texts.open_requests -= 1
        self._texts[key] = texts
        idle = [(k, t.index.num_indexed) for k, t in self._texts.items() if not t.open_requests]
        kept = sum(tokens for _, tokens in idle)
        for key, tokens in idle:
            if kept <= _KEPT_TOKENS:
                break
            del self._texts[key]
            kept -= tokens

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        drafting: _Drafting = sequence.drafting
        draft, drafting.matched = drafting.index.continuation(drafting.text, most)
        return draft[: drafting.acceptance.length(drafting.matched, len(draft))] if draft else []

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        drafting: _Drafting = sequence.drafting
        drafting.acceptance.observe(drafting.matched, drafted, accepted)


def _key(request: Request) -> bytes:
    return array("i", request.prompt).tobytes()
