"""An engine that writes down everything that decides what it does, so that `replay.py` can do it again.

An asynchronous run differs from the next by one thing alone: in which step a request came, or weights did. One line of
JSON an event, in order:

    engine   the configuration and the version it starts with
    add      a request; abort: one given up
    update   a version, and whether the KV cache was kept; its weights lie beside, one file for all engines of a run
    step     tokens computed of which sample, and tokens drawn for which

Weights are a whole copy of the model for each version: this is for finding a fault, not for every run.
"""

import json
import os
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from inference.engine import Engine, KvPolicy
from inference.request import Request, Sequence
from inference.scheduler import StepPlan
from inference.staged_update import StagedUpdate
from olmorl.contract.generation import EngineConfig, SamplingParams


@dataclass(slots=True)
class StepRecord:
    computed: list[tuple[str, int, int]] = field(default_factory=list)
    """(request, sample, tokens), in the order of the batch"""
    drawn: list[tuple[str, int, list[int]]] = field(default_factory=list)
    """(request, sample, token ids)"""


class WatchedEngine(Engine):
    """Knows what its last step computed, and which tokens became known in it."""

    def __init__(self, config: EngineConfig, *, initial_version: int = 0) -> None:
        self.last_step = StepRecord()
        super().__init__(config, initial_version=initial_version)

    def step(self) -> list[Sequence]:
        self.last_step = StepRecord()
        return super().step()

    def _compute(self, plan: StepPlan) -> bool:
        self.last_step.computed = [(s.request.request_id, s.sample_index, count) for s, count in plan.chunks]
        return super()._compute(plan)

    def _land(self, depth: int) -> None:
        landing = list(self._flights)[: max(0, len(self._flights) - depth)]
        before = {id(s): (s, len(s.token_ids)) for flight in landing for s in flight.drawing}
        super()._land(depth)
        self.last_step.drawn += [
            (s.request.request_id, s.sample_index, s.token_ids[length:])
            for s, length in before.values()
            if len(s.token_ids) > length
        ]


class RecordedEngine(WatchedEngine):
    def __init__(self, config: EngineConfig, *, path: Path, initial_version: int = 0) -> None:
        """Writes to `path`, a .jsonl file, and to weights/ beside it."""
        super().__init__(config, initial_version=initial_version)
        self._weights = path.parent / "weights"
        self._weights.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)  # a line at a time: what happened before a crash is there
        measured = replace(config, speculative_step_tokens=self.speculation.step_tokens)
        self._write("engine", config=asdict(measured), version=initial_version)

    def add(
        self,
        request_id: str,
        prompt: Items[int],
        params: SamplingParams,
        *,
        sample_indices: tuple[int, ...] | None = None,
        lengths: Items[int] | None = None,
        priority: int = 0,
        tag: Any = None,
    ) -> Request:
        request = super().add(
            request_id, prompt, params, sample_indices=sample_indices, lengths=lengths, priority=priority, tag=tag
        )
        self._write(
            "add",
            request=request_id,
            prompt=request.prompt,
            params=asdict(params),
            samples=request.sample_indices,
            lengths=None if lengths is None else list(lengths),
            priority=priority,
        )
        return request

    def abort(self, request_id: str) -> list[Sequence]:
        aborted = super().abort(request_id)
        if aborted:
            self._write("abort", request=request_id)
        return aborted

    def step(self) -> list[Sequence]:
        had_work = self.scheduler.has_work
        finished = super().step()
        if had_work:
            self._write("step", **asdict(self.last_step))
        return finished

    def commit(self, staged: StagedUpdate, version: int, *, kv: KvPolicy = "keep") -> float:
        seconds = super().commit(staged, version, kv=kv)
        self._save_weights(version)
        self._write("update", version=version, kv=kv)
        return seconds

    def _save_weights(self, version: int) -> None:
        """Of all engines of a run, whoever comes first writes; no reader sees half a file."""
        path = weights_file(self._weights.parent, version)
        if path.exists():
            return
        part = path.with_suffix(f".{os.getpid()}.part")
        save_file({name: tensor.contiguous() for name, tensor in self.whole_weights().items()}, part)
        part.replace(path)

    def _write(self, event: str, **what: Any) -> None:
        line = json.dumps({"event": event, **what}, separators=(",", ":"), default=lambda number: number.item())
        self._file.write(line + "\n")


def weights_file(folder: Path, version: int) -> Path:
    return folder / "weights" / f"version_{version:06d}.safetensors"


def open_engine(config: EngineConfig, *, name: str, initial_version: int) -> Engine:
    """One that records to `name`.jsonl, if the config says where."""
    if config.schedule_dir is None:
        return Engine(config, initial_version=initial_version)
    path = Path(config.schedule_dir) / f"{name}.jsonl"
    return RecordedEngine(config, path=path, initial_version=initial_version)
