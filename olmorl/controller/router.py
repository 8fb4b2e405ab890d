"""Which inference worker gets the next group: the one with the least work in hand. Pure policy."""

from collections.abc import Sequence


class Router:
    def __init__(self, workers: Sequence[str]) -> None:
        assert workers, "a router needs at least one worker"
        self._samples_in_hand = dict.fromkeys(workers, 0)

    def pick(self, num_samples: int) -> str:
        """Samples of a group stay on one worker: they share the prompt's KV blocks."""
        worker = min(self._samples_in_hand, key=lambda name: self._samples_in_hand[name])
        self._samples_in_hand[worker] += num_samples
        return worker

    def finished(self, worker: str, num_samples: int) -> None:
        self._samples_in_hand[worker] -= num_samples
        assert self._samples_in_hand[worker] >= 0, f"{worker} finished more samples than it was given"
