"""The driver's part of a checkpoint: where the prompt stream stood, and what became of the prompts taken from it.

Captured at one moment, together with the rows of the step. A group that was finished by then is kept with its samples;
a prompt whose group was not is issued again with the same seed. So every occurrence of a prompt ends exactly once along
the surviving checkpoints, and what took long is not lost more often than what did not.
"""

import json
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import OBSERVED, RolloutSample
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.group import Fate, Group, ScoredSample, State
from olmorl.controller.recorder import Totals
from olmorl.controller.run_directory import write_atomically
from olmorl.controller.step_metrics import rollout_rows
from olmorl.data.prompt import Prompt
from olmorl.metrics.rollout_log import RolloutRow, read_rollouts, write_rollouts

FILE = "driver.json"
SAMPLES_FILE = "finished.parquet"  # samples of the groups that were finished, like a step's rollout file
OF_GROUPS = ("rollout", "sampling", "reward", "loss")  # sections that a finished group depends on
SHOWN = 100  # characters of a setting

log = logging.getLogger(__name__)


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
class Finished:
    """A group that could be trained, and was not yet. Its samples lie in SAMPLES_FILE."""

    epoch: int
    position: int
    admitted_version: int
    overtaken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    step: int
    """optimizer steps done = version of the weights beside this file"""
    stream: dict[str, Any]
    again: list[tuple[int, int]]
    """(epoch, position) of prompts to be issued again, oldest first"""
    finished: list[Finished]
    """oldest first"""
    rows: list[RolloutRow]
    """the samples of those, group after group"""
    totals: Totals
    settings: dict[str, dict[str, Any]]
    """of each section of the config; checkpoints of old have only those that finished groups were made under"""
    seed: int

    @classmethod
    def capture(
        cls, *, step: int, attempt: int, prompts: PromptQueue, buffer: RolloutBuffer, totals: Totals, config: Config
    ) -> "DriverState":
        outstanding = buffer.outstanding()
        finished = [g for g in outstanding if g.state in (State.FINISHED, State.TAKEN)]
        again = [*(g.prompt for g in outstanding if g not in finished), *prompts.again]
        return cls(
            step=step,
            stream=prompts.state(),
            again=[(p.epoch, p.position) for p in again],
            finished=[
                Finished(
                    epoch=g.prompt.epoch,
                    position=g.prompt.position,
                    admitted_version=g.admitted_version,
                    overtaken=g.overtaken,
                )
                for g in finished
            ],
            rows=rollout_rows(finished, step=step, attempt=attempt, t_trained=None),
            totals=replace(totals),
            settings=config.model_dump(mode="json"),
            seed=config.run.seed,
        )

    def save(self, folder: Path) -> None:
        write_rollouts(folder / SAMPLES_FILE, self.rows)
        fields = asdict(replace(self, rows=[]))
        del fields["rows"]
        write_atomically(folder / FILE, json.dumps(fields) + "\n")

    @classmethod
    def load(cls, folder: Path, *, config: Config) -> "DriverState":
        """Raises ConfigError when the seed is another, or the files are broken. Groups made under other settings are
        issued again."""
        try:
            state = cls._read(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{folder} is broken ({type(error).__name__}: {reason}); move it away, and --resume continues the "
                "checkpoint before it"
            ) from None
        if state.seed != config.run.seed:
            raise ConfigError(
                f"{folder} was made with run.seed = {state.seed}, the config says {config.run.seed}; keep the seed"
            )
        now = config.model_dump(mode="json")
        changed = [name for name in OF_GROUPS if state.settings.get(name) != now[name]]
        if changed and state.finished:
            log.warning(
                "[%s] changed since the checkpoint: %d finished groups are made anew",
                "], [".join(changed),
                len(state.finished),
            )
            again = [(group.epoch, group.position) for group in state.finished] + state.again
            state = replace(state, again=again, finished=[], rows=[])
        return state

    @classmethod
    def _read(cls, folder: Path) -> "DriverState":
        raw = json.loads((folder / FILE).read_text())
        return cls(
            **{
                **raw,
                "again": [tuple(occurrence) for occurrence in raw["again"]],
                "finished": [Finished(**group) for group in raw["finished"]],
                "rows": read_rollouts(folder / SAMPLES_FILE),
                "totals": Totals(**raw["totals"]),
            }
        )

    def changes(self, config: Config) -> list[str]:
        """Each setting that is another now, with the old and the new value. A key of a newer version was never set."""
        now = config.model_dump(mode="json")
        return [
            f"{section}.{key}: {_shown(value)} -> {_shown(now[section][key])}"
            for section, values in self.settings.items()
            for key, value in values.items()
            if section in now and key in now[section] and now[section][key] != value
        ]

    def prompts(self, source: PromptSource) -> PromptQueue:
        source.restore(self.stream)
        return PromptQueue(source, [source.prompt_at(epoch, position) for epoch, position in self.again])

    def groups(self, source: PromptSource) -> list[Group]:
        """The finished groups, as they were."""
        rows = defaultdict(list)
        for row in self.rows:
            rows[row.prompt_id].append(row)
        prompts = [source.prompt_at(group.epoch, group.position) for group in self.finished]
        return [
            _group(prompt, rows[prompt.prompt_id], finished=group)
            for prompt, group in zip(prompts, self.finished, strict=True)
        ]


def _shown(value: object) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _group(prompt: Prompt, rows: Sequence[RolloutRow], *, finished: Finished) -> Group:
    first, samples = rows[0], [_scored_sample(row) for row in rows]
    assert first.seed is not None, f"{prompt.prompt_id}: a group without a seed"
    return Group(
        prompt=prompt,
        order=0,
        admitted_version=finished.admitted_version,
        seed=first.seed,
        t_admitted=first.t_admitted,
        state=State.FINISHED,
        samples=samples,
        tokens_received=sum(s.num_drawn for s in samples),
        has_signal=any(s.fate in (Fate.TRAINED, Fate.TRUNCATED) for s in samples),
        overtaken=finished.overtaken,
    )


def _scored_sample(row: RolloutRow) -> ScoredSample:
    assert row.verdict is not None and row.fate is not None, f"{row.rollout_id}: a finished sample without a verdict"
    sample = RolloutSample(
        request_id=row.prompt_id,
        lease=0,
        sample_index=row.sample,
        worker=row.worker,
        token_ids=row.token_ids,
        logprobs=row.logprobs,
        raw_logprobs=row.raw_logprobs,
        version_spans=row.version_spans,
        text=row.text,
        finish_reason=row.finish_reason,
        kv_events=row.kv_events,
        t_first_token=row.t_first_token or 0.0,
        t_finished=row.t_finished or 0.0,
    )
    observed = [span for span in row.version_spans if span[0] == OBSERVED]
    drawn = np.ones(len(row.token_ids), np.bool_)
    for _, start, end in observed:
        drawn[start:end] = False
    return ScoredSample(
        sample=sample,
        reward=row.reward,
        verdict=row.verdict,
        detail=row.verdict_detail or "",
        drawn=drawn if observed else None,
        advantage=row.advantage or 0.0,
        fate=Fate(row.fate),
    )
