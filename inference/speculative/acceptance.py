"""How long a draft may be, from how many tokens of earlier ones were right.

Long matches are right more often than short ones, hence a rate for each range of lengths. Old outcomes fade; while a
rate is too low to draft at all, it creeps back to where it began, so that it is tried again. No torch here.
"""

_BOUNDS = (4, 8, 16)  # of the ranges of match lengths
_RATE, _WEIGHT = 0.7, 2.0  # what is believed before anything was seen, and how many tokens that counts for
_KEPT = 0.8  # of earlier outcomes, at each new one
_RECOVERY = 0.02  # of the way back, at each draft not made


class Acceptance:
    """Of one sample."""

    def __init__(self, *, least: float) -> None:
        """A token that is less likely than `least` to be reached and right is not worth its place."""
        self._least = least
        self._right = [_RATE * _WEIGHT] * (len(_BOUNDS) + 1)
        self._judged = [_WEIGHT] * (len(_BOUNDS) + 1)

    def rate(self, matched: int) -> float:
        """The probability that the next token of a draft is right, the ones before it being right."""
        index = _range(matched)
        return self._right[index] / self._judged[index]

    def length(self, matched: int, most: int) -> int:
        """Tokens worth drafting behind a match of that length."""
        rate = reached = self.rate(matched)
        length = 0
        while length < most and reached >= self._least:
            reached *= rate
            length += 1
        if length == 0:
            index = _range(matched)
            self._right[index] += _RECOVERY * (_RATE * _WEIGHT - self._right[index])
            self._judged[index] += _RECOVERY * (_WEIGHT - self._judged[index])
        return length

    def observe(self, matched: int, drafted: int, accepted: int) -> None:
        """Behind the first wrong token none was judged."""
        index = _range(matched)
        self._right[index] = _KEPT * self._right[index] + accepted
        self._judged[index] = _KEPT * self._judged[index] + accepted + (accepted < drafted)


def _range(matched: int) -> int:
    return sum(matched >= bound for bound in _BOUNDS)
