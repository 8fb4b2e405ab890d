"""Where the end of a text stood before, in itself or in other answers to the same prompt, and what came then.

Like the match finder of a Lempel-Ziv coder: the last `ORDER` tokens lead to the latest place where they stood, every
place to the one before it, and of a few such places the one with the longest match is taken. A token costs one entry,
about 250 bytes. No torch here.
"""

ORDER = 3
_CANDIDATES = 16
_LONGEST = 32  # tokens, beyond which a match is no better
MOST_TOKENS = 1 << 17  # with as many in the index, texts get into it only when they themselves are asked for

Place = tuple[int, int]
"""a text, and the index of a token of it"""


class SuffixIndex:
    def __init__(self, shared: int = 0) -> None:
        """`shared`: leading tokens that all texts have in common, and that one alone brings in."""
        self._shared = shared
        self.texts: list[list[int]] = []
        """they grow outside, and only at their ends"""
        self._latest: dict[tuple[int, ...], Place] = {}
        """by the `ORDER` tokens before it"""
        self._earlier: list[list[Place | None]] = []
        """of each text, from its first token that was brought in on: the place before it with the same tokens before"""
        self.num_indexed = 0

    def add(self, text: list[int]) -> int:
        """The number of a text."""
        self.texts.append(text)
        self._earlier.append([])
        return len(self.texts) - 1

    def continuation(self, number: int, most: int) -> tuple[list[int], int]:
        """At most `most` tokens that may follow a text, and the length of the match that says so; none: [], 0."""
        self._catch_up(number)
        text = self.texts[number]
        end = len(text)
        if end < ORDER:
            return [], 0
        best, longest = None, 0
        place = self._latest.get(tuple(text[end - ORDER :]))
        if place == (number, end):
            place = self._earlier[number][end - self._first(number)]
        for _ in range(_CANDIDATES):
            if place is None:
                break
            source, at = place
            matched = _match(self.texts[source], at, text)
            if matched > longest and at < len(self.texts[source]):
                best, longest = place, matched
                if matched == _LONGEST:
                    break
            place = self._earlier[source][at - self._first(source)]
        if best is None:
            return [], 0
        source, at = best
        if at < self._shared:  # that stands in every text
            source = number
        following = self.texts[source][at : at + most]
        if source == number:  # what is copied may itself be what is to follow: a loop goes on
            while len(following) < most:
                following += following[: most - len(following)]
        return following, longest

    def _first(self, number: int) -> int:
        return max(ORDER, self._shared) if number else ORDER

    def _catch_up(self, asked: int) -> None:
        latest = self._latest
        for number, (text, earlier) in enumerate(zip(self.texts, self._earlier, strict=True)):
            if number != asked and self.num_indexed >= MOST_TOKENS:
                continue
            begin = self._first(number) + len(earlier)
            for at in range(begin, len(text) + 1):
                key = tuple(text[at - ORDER : at])
                earlier.append(latest.get(key))
                latest[key] = number, at
            self.num_indexed += max(0, len(text) + 1 - begin)


def _match(source: list[int], at: int, text: list[int]) -> int:
    """How many tokens before `at` are those at the end of `text`."""
    end = len(text)
    most = min(at, end, _LONGEST)
    matched = ORDER
    while matched < most and source[at - matched - 1] == text[end - matched - 1]:
        matched += 1
    return matched
