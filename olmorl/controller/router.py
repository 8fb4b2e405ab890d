"""Which inference worker gets the next group: the one with the least work in hand. Pure policy."""


class Router:
    def __init__(self) -> None:
        self._samples_in_hand: dict[str, int] = {}

    def add(self, worker: str) -> None:
        self._samples_in_hand[worker] = 0

    def remove(self, worker: str) -> None:
        del self._samples_in_hand[worker]

    def pick(self, num_samples: int, *, prefer: str | None = None) -> str | None:
        """Samples of a group stay on one worker: they share the prompt's KV blocks. `prefer` is taken while it is
        there: it has the KV of the turns before. None while there is no worker."""
        if not self._samples_in_hand:
            return None
        least_busy = min(self._samples_in_hand, key=lambda name: self._samples_in_hand[name])
        worker = prefer if prefer in self._samples_in_hand else least_busy
        self._samples_in_hand[worker] += num_samples
        return worker

    def finished(self, worker: str, num_samples: int) -> None:
        """`worker` may have been removed since: then its work was given to others."""
        if worker in self._samples_in_hand:
            self._samples_in_hand[worker] -= num_samples
            assert self._samples_in_hand[worker] >= 0, f"{worker} finished more samples than it was given"
