"""Do again, in one process, what an engine of a run did: the same requests and weights before the same steps.

The engine is a function of its events, so the tokens must come out equal; where they do not, the first that differs is
told. Stop a debugger there: this is how a fault of an asynchronous run is looked at.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from inference.recorded_engine import WatchedEngine, weights_file
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, SamplingParams


@dataclass(frozen=True, slots=True)
class Divergence:
    step: int
    """counted from 0"""
    what: str


@dataclass(frozen=True, slots=True)
class ReplayReport:
    steps: int
    tokens: int
    updates: int
    divergence: Divergence | None

    def __str__(self) -> str:
        if self.divergence is not None:
            return f"diverged at step {self.divergence.step}: {self.divergence.what}"
        return f"identical: {self.steps} steps, {self.tokens} tokens, {self.updates} updates"


def replay_schedule(path: Path) -> ReplayReport:
    """Of one engine, as `RecordedEngine` wrote it. ConfigError when the record or the weights cannot be read."""
    events = _read(path)
    first = next(events, None)
    if first is None or first["event"] != "engine":
        raise ConfigError(f"{path} does not begin with an engine; it is no recorded schedule")
    engine = WatchedEngine(_config(first["config"]), initial_version=first["version"])
    steps = tokens = updates = 0
    for event in events:
        if event["event"] == "step":
            engine.step()
            divergence = _compare(event, engine, steps)
            if divergence is not None:
                return ReplayReport(steps, tokens, updates, divergence)
            steps += 1
            tokens += sum(len(drawn) for _, _, drawn in event["drawn"])
        elif event["event"] == "add":
            engine.add(
                event["request"],
                event["prompt"],
                SamplingParams(**event["params"]),
                sample_indices=tuple(event["samples"]),
                lengths=event["lengths"],
                priority=event["priority"],
            )
        elif event["event"] == "abort":
            engine.abort(event["request"])
        elif event["event"] == "update":
            _update(engine, path.parent, event["version"], event["kv"])
            updates += 1
    return ReplayReport(steps, tokens, updates, None)


def _update(engine: WatchedEngine, folder: Path, version: int, kv: Any) -> None:
    file = weights_file(folder, version)
    if not file.exists():
        raise ConfigError(f"{file} is missing: without the weights of version {version} the schedule ends here")
    engine.update_weights(load_file(file).items(), version, kv=kv)


def _compare(event: dict[str, Any], engine: WatchedEngine, step: int) -> Divergence | None:
    for name, ours in (("computed", engine.last_step.computed), ("drawn", engine.last_step.drawn)):
        theirs = [tuple(entry) for entry in event[name]]
        for recorded, replayed in zip(theirs, ours, strict=False):
            if recorded != replayed:
                return Divergence(step, f"{name} (request, sample, tokens) {recorded} in the run, {replayed} here")
        if len(theirs) != len(ours):
            return Divergence(step, f"{name} of {len(theirs)} samples in the run, of {len(ours)} here")
    return None


def _config(recorded: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in fields(EngineConfig)}
    unknown = recorded.keys() - known
    if unknown:
        raise ConfigError(
            f"the schedule was recorded by another version of olmorl: it sets {', '.join(sorted(unknown))}"
        )
    return replace(EngineConfig(**recorded), schedule_dir=None)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """A last line that a crash cut short is left out."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            raise ConfigError(f"{path}, line {number}, is not JSON") from None
