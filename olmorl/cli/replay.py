"""`olmorl replay`: draw one rollout of a run again, and say whether it came out the same."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from olmorl.config.load import load_config
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import OBSERVED, KvEvent
from olmorl.controller.evaluate import eval_params
from olmorl.controller.fleet import engine_config
from olmorl.controller.loop import training_params
from olmorl.controller.placement import plan_placement
from olmorl.controller.run_directory import RunDirectory
from olmorl.dashboard.run_data import RolloutsOf, RunData
from olmorl.dashboard.samples import versions_of
from olmorl.metrics.rollout_log import RolloutRow, read_rollouts

if TYPE_CHECKING:
    from inference.rollout_replay import RecordedTurn


def replay(run_directory: Path, rollout_id: str, *, device: str | None, step: int | None = None) -> int:
    """The exit code. ConfigError: no such rollout, or weights that are no longer there.

    An evaluation draws under the same ids at each version: `step` says which, else it is the newest.
    """
    directory = RunDirectory(run_directory)
    row, of = _find(RunData(directory.path), rollout_id, step)
    config = load_config(directory.config_file, [f"inference.device={device}"] if device else [])
    assert row.seed is not None, f"{rollout_id} was drawn without a seed, which no run does"
    from inference.rollout_replay import needed_versions, replay_rollout
    from learner.kept_weights import read_weights

    turns = _turns(row)
    places = {version: directory.find_weights(version) for version in needed_versions(turns) if version > 0}
    if missing := [str(version) for version, place in places.items() if place is None]:
        raise ConfigError(
            f"{rollout_id} cannot be drawn again: the weights of version {', '.join(missing)} are no longer kept. "
            f"checkpoint.keep_versions = {config.checkpoint.keep_versions} keeps so many newest ones, beside those of "
            "checkpoints"
        )
    if of == "evals":
        params, where = eval_params(config, n=row.sample + 1, seed=row.seed), f"the evaluation of version {row.step}"
    else:
        params, where = training_params(config, seed=row.seed), f"step {row.step}"
    report = replay_rollout(
        engine_config(config, plan_placement(config)),
        params,
        sample=row.sample,
        turns=turns,
        weights=lambda version: read_weights(places[version] or Path()),
    )
    print(f"{rollout_id} of {where}, {_describe(row)}: {report}")
    return 0 if report.divergence is None else 1


def _describe(row: RolloutRow) -> str:
    kinds = [kind for _, _, kind in row.kv_events]
    versions = {version for version, _, _ in row.version_spans} - {OBSERVED}
    return (
        f"{len(versions)} version{'s' * (len(versions) > 1)}, {kinds.count('swap')} swaps, "
        f"{kinds.count('recompute')} recomputed"
    )


def _find(run: RunData, rollout_id: str, step: int | None) -> tuple[RolloutRow, RolloutsOf]:
    folders: tuple[RolloutsOf, ...] = ("rollouts", "evals")
    for of in folders:
        for number in reversed(run.rollout_steps(of)):
            if step in (None, number):
                for row in read_rollouts(run.rollouts_file(number, of), rollout_id=rollout_id):
                    return row, of
    raise ConfigError(
        f"{run.directory} has no rollout {rollout_id!r}{'' if step is None else f' of step {step}'}; `olmorl inspect` "
        "shows those of the newest step, --step those of another, and --eval those of evaluations"
    )


def _turns(row: RolloutRow) -> list["RecordedTurn"]:
    """What the policy drew without a break, each with its events, which begin with a prefill."""
    from inference.rollout_replay import RecordedTurn

    events: list[list[KvEvent]] = []
    for event in row.kv_events:
        if event[2] == "prefill":
            events.append([])
        events[-1].append(event)
    drawn = np.array(versions_of(row)) != OBSERVED
    turns: list[RecordedTurn] = []
    start = 0
    for is_drawn, tokens in groupby(drawn):
        end = start + len(list(tokens))
        if is_drawn and len(turns) < len(events):
            turns.append(
                RecordedTurn(
                    start=start,
                    prompt_token_ids=np.concatenate([row.prompt_token_ids, row.token_ids[:start]]),
                    token_ids=row.token_ids[start:end],
                    logprobs=row.logprobs[start:end],
                    kv_events=tuple(events[len(turns)]),
                )
            )
        start = end
    if len(turns) != len(events) or len(drawn) == 0:
        raise ConfigError(
            f"{row.rollout_id}: the record names {len(events)} prefills, its tokens tell of another number"
        )
    return turns
