"""The driver's part of a checkpoint: where the prompt stream stood, and which prompts were still under way.

Captured at one moment, together with the rows of the step: whatever has no fate by then is re-issued after a restart,
so every occurrence of a prompt ends exactly once along the surviving checkpoints.
"""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from olmorl.contract.errors import ConfigError
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.recorder import Totals
from olmorl.controller.run_directory import write_json
from olmorl.data.prompt import Prompt

FILE = "driver.json"


class PromptSource(Protocol):
    @property
    def has_next(self) -> bool: ...
    def next(self) -> Prompt: ...
    def prompt_at(self, epoch: int, position: int) -> Prompt: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class PromptQueue:
    """What `feed` admits next: first prompts that an earlier attempt left without a fate, then the stream."""

    def __init__(self, source: PromptSource, again: Iterable[Prompt] = ()) -> None:
        self._source = source
        self._again = deque(again)

    def __iter__(self) -> "PromptQueue":
        return self

    def __next__(self) -> Prompt:
        return self._again.popleft() if self._again else self._source.next()

    @property
    def has_next(self) -> bool:
        return bool(self._again) or self._source.has_next

    def state(self) -> dict[str, Any]:
        return self._source.state()

    @property
    def again(self) -> list[Prompt]:
        return list(self._again)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    step: int
    """optimizer steps done = version of the weights beside this file"""
    stream: dict[str, Any]
    outstanding: list[tuple[int, int]]
    """(epoch, position) of prompts without a fate, oldest first"""
    totals: Totals
    seed: int

    @classmethod
    def capture(
        cls, *, step: int, prompts: PromptQueue, buffer: RolloutBuffer, totals: Totals, seed: int
    ) -> "DriverState":
        without_fate = [*(g.prompt for g in buffer.outstanding()), *prompts.again]
        outstanding = [(p.epoch, p.position) for p in without_fate]
        return cls(step=step, stream=prompts.state(), outstanding=outstanding, totals=replace(totals), seed=seed)

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path, *, seed: int) -> "DriverState":
        raw = json.loads((folder / FILE).read_text())
        state = cls(**{**raw, "totals": Totals(**raw["totals"]), "outstanding": [tuple(o) for o in raw["outstanding"]]})
        if state.seed != seed:
            raise ConfigError(f"{folder} was made with run.seed = {state.seed}, the config says {seed}; keep the seed")
        return state

    def prompts(self, source: PromptSource) -> PromptQueue:
        source.restore(self.stream)
        return PromptQueue(source, [source.prompt_at(epoch, position) for epoch, position in self.outstanding])
