"""Longest expected first, among the prompts next in the source: long answers that begin last are what a tail is.

How long an answer will be is learned from those already there of the same data source; of one source the longest
prompt goes first. Only so many prompts are looked ahead, so that memory stays bounded. Pure policy.
"""

import heapq
from collections.abc import Iterator

from olmorl.data.prompt import Prompt


class Lookahead:
    def __init__(self, prompts: Iterator[Prompt], *, size: int, guess: float) -> None:
        """`guess`: tokens of an answer of a data source that nothing is known of."""
        self._prompts = prompts
        self._size = size
        self._guess = guess
        self._waiting: dict[str, list[tuple[int, int, Prompt]]] = {}
        self._num_waiting = 0
        self._lengths: dict[str, tuple[int, int]] = {}  # tokens and number of finished answers

    def pop(self) -> Prompt | None:
        """None at the end of the source."""
        while self._num_waiting < self._size and (prompt := next(self._prompts, None)) is not None:
            heap = self._waiting.setdefault(prompt.data_source, [])
            heapq.heappush(heap, (-len(prompt.token_ids), prompt.index, prompt))
            self._num_waiting += 1
        if not self._num_waiting:
            return None
        source = max(self._waiting, key=self._expected)
        _, _, prompt = heapq.heappop(self._waiting[source])
        if not self._waiting[source]:
            del self._waiting[source]
        self._num_waiting -= 1
        return prompt

    def finished(self, data_source: str, num_tokens: int) -> None:
        """An answer came to `num_tokens`."""
        tokens, count = self._lengths.get(data_source, (0, 0))
        self._lengths[data_source] = (tokens + num_tokens, count + 1)

    def _expected(self, source: str) -> float:
        tokens, count = self._lengths.get(source, (0, 0))
        return tokens / count if count else self._guess
