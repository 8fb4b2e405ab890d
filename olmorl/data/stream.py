"""The order in which prompts are served: a pure function of seed and epoch, so that a cursor is two numbers."""

from dataclasses import fields
from functools import lru_cache

import numpy as np

from olmorl.contract.errors import ConfigError
from olmorl.data.prompt import EncodedExample, Prompt
from olmorl.data.prompt_set import PromptSet

StreamState = dict[str, int | str | bool]


class PromptStream:
    """Serves a set epoch after epoch, for ever, each in an order of its own. An epoch holds every prompt once, or of
    each source what its weight or count says."""

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool = True) -> None:
        assert len(prompts) > 0, "an empty set cannot be streamed"
        self._prompts = prompts
        self._identity: StreamState = {"seed": seed, "shuffle": shuffle, "data": prompts.fingerprint}
        sizes, counts = ([getattr(share, key) for share in prompts.shares] for key in ("size", "per_epoch"))
        self._starts = np.cumsum([0, *sizes])
        self._slots = np.cumsum([0, *counts])
        self.prompts_per_epoch = int(self._slots[-1])
        self._order = lru_cache(maxsize=4)(lambda epoch: epoch_order(self.prompts_per_epoch, seed, epoch, shuffle))
        self._source_order = lru_cache(maxsize=64)(
            lambda source, epoch: epoch_order(sizes[source], seed, epoch, shuffle, stream=source + 1)
        )
        self.epoch = 0
        self.position = 0

    @property
    def has_next(self) -> bool:
        """A stream has no end."""
        return True

    def next(self) -> Prompt:
        prompt = self.prompt_at(self.epoch, self.position)
        self.position += 1
        if self.position == self.prompts_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
        return prompt

    def prompt_at(self, epoch: int, position: int) -> Prompt:
        """The same occurrence that `next` served there, or will; the cursor stays where it is."""
        if epoch < 0 or not 0 <= position < self.prompts_per_epoch:
            raise IndexError(f"no prompt at epoch {epoch}, position {position} of {self.prompts_per_epoch}")
        row, repeat = self._find(epoch, int(self._order(epoch)[position]))
        example = self._prompts.examples[row]
        values = {field.name: getattr(example, field.name) for field in fields(EncodedExample)}
        return Prompt(**values, epoch=epoch, position=position, repeat=repeat)

    def _find(self, epoch: int, slot: int) -> tuple[int, int]:
        """The row in the set, and the number of the source's own epochs that began in this one before the row."""
        source = int(np.searchsorted(self._slots, slot, side="right")) - 1
        share, start = self._prompts.shares[source], int(self._starts[source])
        place = slot - int(self._slots[source])
        if share.per_epoch == share.size:
            return start + place, 0
        served = epoch * share.per_epoch
        source_epoch, place = divmod(served + place, share.size)
        return start + int(self._source_order(source, source_epoch)[place]), source_epoch - served // share.size

    def state(self) -> StreamState:
        """Where the cursor stands and in what order of which data; plain values for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def restore(self, state: StreamState) -> None:
        """Raises ConfigError when data, seed or shuffling are not those the cursor was made with."""
        data = "what data.train gives (rows, answers, mixture, or how prompts are rendered and which are too long)"
        names = {"seed": "run.seed", "shuffle": "data.shuffle", "data": data}
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise ConfigError(
                    f"cannot resume: {names[key]} changed since the checkpoint ({state.get(key)!r} then, {value!r} "
                    "now), so its place in the data means nothing; restore it, or start a new run"
                )
        epoch, position = state["epoch"], state["position"]
        assert isinstance(epoch, int) and isinstance(position, int), f"broken stream state {state}"
        self.epoch, self.position = epoch, position


def epoch_order(num_prompts: int, seed: int, epoch: int, shuffle: bool, *, stream: int = 0) -> np.ndarray:
    """[num_prompts] int64, another for each `stream`.

    Sorting raw Philox words, which numpy promises never to change, keeps the order the same across versions and
    machines; its shuffles make no such promise.
    """
    if not shuffle:
        return np.arange(num_prompts)
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=[0, 0, 0, stream]).random_raw(num_prompts), kind="stable")
