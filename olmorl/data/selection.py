"""Which rows of the stream are worth serving: solved ones are retired, hopeless ones rest. Pure policy.

What is known of a row comes from the groups that met their fate, so that a checkpoint and the rows on disk agree. A
row that is passed over leaves the order of all others as it is.
"""

from typing import Any

from olmorl.data.prompt import Prompt
from olmorl.data.stream import PromptStream

LONGEST_REST = 1024  # times the first


class PromptSelection:
    """A prompt stream without the rows that are retired or rest. `step` is the policy version last trained."""

    def __init__(
        self, stream: PromptStream, *, num_rows: int, retire_pass_rate: float | None = None, rest_steps: int = 0
    ) -> None:
        """`retire_pass_rate` None retires no row, `rest_steps` 0 lets none rest."""
        self._stream = stream
        self._num_rows = num_rows
        self._retire_pass_rate = retire_pass_rate
        self._rest_steps = rest_steps
        self._pass_rates: dict[int, tuple[float, int, int]] = {}  # row -> newest rate, failures in a row, rests until
        self._retired: set[int] = set()
        self._resting: dict[int, int] = {}  # row -> step at which it may be served again
        self._step = 0
        self.num_skipped = 0

    @property
    def num_retired(self) -> int:
        return len(self._retired)

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    @property
    def has_next(self) -> bool:
        """False when every row is retired."""
        return len(self._retired) < self._num_rows

    def record(self, prompt: Prompt, *, pass_rate: float | None, has_signal: bool) -> None:
        """A group of `prompt` met its fate. Without a score nothing is learned of the row."""
        if pass_rate is None:
            return
        row = prompt.index
        _, failures, until = self._pass_rates.get(row, (0.0, 0, 0))
        hopeless = pass_rate == 0 and not has_signal
        failures = failures + 1 if hopeless else 0
        if hopeless and self._rest_steps:
            until = self._step + self._rest_steps * min(2 ** (failures - 1), LONGEST_REST)
        self._pass_rates[row] = (pass_rate, failures, until)
        self._place(row)

    def advance(self, step: int) -> None:
        """`step` was trained: rests that end with it are over."""
        self._step = step
        self._resting = {row: until for row, until in self._resting.items() if until > step}

    def next(self) -> Prompt:
        """The next prompt that is neither retired nor resting. Where nothing else is left, the rests that would end
        first end now."""
        assert self.has_next, "every row is retired"
        if len(self._retired) + len(self._resting) == self._num_rows:
            earliest = min(self._resting.values())
            for row in [row for row, until in self._resting.items() if until == earliest]:
                pass_rate, failures, _ = self._pass_rates[row]
                self._pass_rates[row] = (pass_rate, failures, self._step)
                del self._resting[row]
        while (prompt := self._stream.next()).index in self._retired or prompt.index in self._resting:
            self.num_skipped += 1
        return prompt

    def prompt_at(self, epoch: int, position: int) -> Prompt:
        return self._stream.prompt_at(epoch, position)

    def state(self) -> dict[str, Any]:
        """Of the stream, and what is known of each row seen: copied, for it goes on changing."""
        return {**self._stream.state(), "step": self._step, "pass_rates": dict(self._pass_rates)}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the stream does."""
        self._stream.restore(state)
        self._step = state.get("step", 0)
        self._pass_rates = {int(row): tuple(known) for row, known in state.get("pass_rates", {}).items()}
        self._retired.clear()
        self._resting.clear()
        for row in self._pass_rates:
            self._place(row)

    def _place(self, row: int) -> None:
        """Where the row belongs, by what is known of it and by the rules of this run."""
        pass_rate, _, until = self._pass_rates[row]
        self._retired.discard(row)
        self._resting.pop(row, None)
        if self._retire_pass_rate is not None and pass_rate >= self._retire_pass_rate:
            self._retired.add(row)
        elif self._rest_steps and until > self._step:
            self._resting[row] = until
