"""Plans beside runs: what the simulation says of runs that were made, and by how much it is off."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.metrics.run_figures import RunFigures, read_figures
from olmorl.planner.costs import EngineCost
from olmorl.planner.fit import fitted_engine, fitted_learner, fitted_sync, measured_device
from olmorl.planner.load import Groups
from olmorl.planner.recorded import recorded_load, setup_of_run
from olmorl.planner.setup import Sharing
from olmorl.planner.shape import model_shape
from olmorl.planner.simulation import Outcome, Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    name: str
    measured: RunFigures
    planned: Outcome

    @property
    def tokens_per_second_off(self) -> float:
        return self.planned.tokens_per_second / self.measured.tokens_per_second - 1

    @property
    def trained_tokens_per_second_off(self) -> float:
        return self.planned.trained_tokens_per_second / self.measured.trained_tokens_per_second - 1

    @property
    def learner_wait_off(self) -> float:
        """In points of the share: 0.02 where 30 % were measured and 32 % planned."""
        return self.planned.learner_wait_share - self.measured.learner_wait_share


def compare(
    runs: Sequence[Path], *, engine: Mapping[str, Any], learner: Mapping[str, Any], sharing: Sharing
) -> list[Compared]:
    """Runs of one model on the machine that `olmorl bench engine` and `olmorl bench learner` measured.

    What an update costs is taken from the run with as many engines in which it took the shortest.

    Raises:
        ConfigError, DataError: a folder is no run, or one too short to compare.
    """
    read = []
    for run in runs:
        if not (run / "config.toml").exists():
            raise ConfigError(f"--check {run} is no run directory: it has no config.toml")
        config = load_config(run / "config.toml")
        figures = read_figures(run, skip=config.rollout.async_steps + 1)
        read.append((run, config, figures))

    def fastest(engines: int) -> RunFigures:
        alike = (figures for _, config, figures in read if config.inference.workers == engines)
        return min(alike, key=lambda figures: figures.update_seconds)

    return [
        Compared(
            name=run.name,
            measured=figures,
            planned=planned(
                config,
                load=recorded_load(run),
                engine=engine,
                learner=learner,
                updates=fastest(config.inference.workers),
                sharing=sharing,
                steps=figures.steps,
            ),
        )
        for run, config, figures in read
    ]


def planned(
    config: Config,
    *,
    load: Groups,
    engine: Mapping[str, Any],
    learner: Mapping[str, Any],
    updates: RunFigures,
    sharing: Sharing,
    steps: int,
) -> Outcome:
    """So many steps of the run of `config`, after those that fill its pipeline, by two benchmarks and by what updates
    cost in a run that hardly waited for them."""
    shape = model_shape(config.model.path)
    inference = config.inference
    held = replace(shape, quantization=inference.quantization, quantize_head=inference.quantize_head)
    degree = inference.tensor_parallel
    cost = fitted_engine(EngineCost(shape=held, device=measured_device(engine), tensor_parallel=degree), engine)
    setup = setup_of_run(
        config,
        load=load,
        engine=cost,
        learner=fitted_learner(shape, learner),
        sync=fitted_sync(shape, updates, bandwidth=cost.device.bandwidth * degree),
        sharing=sharing,
    )
    return Simulation(setup).run(steps, warm_up=config.rollout.async_steps + 1)


def median_errors(compared: Sequence[Compared]) -> dict[str, float]:
    """Of what is planned: relative for rates, in points of the share for the learner's wait."""
    return {
        name: statistics.median(abs(getattr(one, name)) for one in compared)
        for name in ("tokens_per_second_off", "trained_tokens_per_second_off", "learner_wait_off")
    }
