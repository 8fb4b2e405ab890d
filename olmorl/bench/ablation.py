"""The ablation: one training load under one switch after another, on the real system.

Each row is a run of its own: engines, learner, verifiers, transport, all real, the same seed, cores and threads. It
begins with static batches, synchronous steps, updates for which engines run empty, and three times the prompts that are
needed; each further row switches one thing on and keeps those before. Beside each row stands what the planner says of
it, from costs fitted on short benchmarks of the parts (`olmorl.bench.calibrate`).
"""

import json
import logging
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from olmorl.bench.calibrate import Benchmarks, benchmarks
from olmorl.bench.drawn_load import LENGTHS_COLUMN, VERIFIER, ModelSize, write_model, write_rows
from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.controller.run import Run
from olmorl.metrics.run_figures import RunFigures, read_figures
from olmorl.planner.check import planned
from olmorl.planner.load import Load, lognormal_lengths
from olmorl.planner.recorded import recorded_load

log = logging.getLogger(__name__)

MEAN_OF_LONGEST = 14628 / 32768  # of OLMo 3's responses
OVERSAMPLING = 3  # of the baseline, as DAPO has it
ENDLESS = 1 << 30  # steps: a row ends by the clock
ROWS_OF_DATA = 4096
SIZE = ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, num_kv_heads=2, vocab_size=1024)


@dataclass(frozen=True, slots=True)
class Switch:
    name: str
    settings: tuple[str, ...]
    """laid over those of the rows before"""


def switches(async_steps: int) -> tuple[Switch, ...]:
    return (
        Switch(
            "baseline",
            (
                "inference.batching=static", "rollout.async_steps=0", "rollout.active_sampling=false",
                f"rollout.oversampling={OVERSAMPLING}", "sync.mode=drain",
            ),
        ),
        Switch("+ continuous batching", ("inference.batching=continuous",)),
        Switch("+ active sampling", ("rollout.active_sampling=true", "rollout.oversampling=none")),
        Switch("+ asynchronous steps", (f"rollout.async_steps={async_steps}",)),
        Switch("+ updates in flight", ("sync.mode=inflight",)),
        Switch("+ int8 rollouts", ("inference.quantization=int8",)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationLoad:
    """The default measures two cores in under 20 minutes."""

    size: ModelSize = SIZE
    prompts_per_step: int = 8
    samples_per_prompt: int = 4
    slots: int = 16
    prompt_tokens: int = 24
    longest: int = 512
    zero_variance: float = 0.5
    async_steps: int = 2
    threads: int = 1
    """of each role"""
    seconds: float = 45.0
    """of a measurement, after the steps that fill the pipeline"""
    steps: int = 3
    """that a measurement has at the least"""
    repeats: int = 2
    seed: int = 0

    def drawn(self) -> Load:
        return Load(
            lengths=lognormal_lengths(MEAN_OF_LONGEST * self.longest, self.longest),
            prompt_tokens=self.prompt_tokens,
            zero_variance=self.zero_variance,
        )

    def write(self, folder: Path) -> None:
        """Model and data, if they are not there."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            write_model(folder / "model", self.size, max_tokens=2 * (self.prompt_tokens + self.longest))
        data, samples = folder / "load.jsonl", self.samples_per_prompt
        write_rows(data, self.drawn(), rows=ROWS_OF_DATA, samples_per_prompt=samples, seed=self.seed)

    def settings(self, folder: Path) -> list[str]:
        """Of the runs on what was written to `folder`."""
        return [
            f"model.path={folder / 'model'}",
            f'data.train={{path = "{folder / "load.jsonl"}", lengths_column = "{LENGTHS_COLUMN}"}}',
            "data.shuffle=false",
            f"reward.verifier={VERIFIER}",
            f"run.seed={self.seed}",
            f"rollout.prompts_per_step={self.prompts_per_step}",
            f"rollout.samples_per_prompt={self.samples_per_prompt}",
            f"rollout.max_prompt_tokens={self.prompt_tokens}",
            f"rollout.max_response_tokens={self.longest}",
            f"inference.max_num_seqs={self.slots}",
            f"inference.kv_cache_tokens={2 * self.slots * (self.prompt_tokens + self.longest)}",
            "optim.lr=0",  # random weights stay what they are; the step is a whole one
            "sync.canary_sequences=0",
            "sync.parity_prompts=0",
        ]


DEFAULT = AblationLoad()
QUICK = AblationLoad(
    size=ModelSize(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64),
    prompts_per_step=2,
    slots=4,
    longest=32,
    seconds=0.1,
    steps=2,
    repeats=1,
)


@dataclass(slots=True, kw_only=True)
class Row:
    name: str
    tokens_per_second: float
    trained_tokens_per_second: float
    mfu: float
    mbu: float
    slot_waste: float
    learner_wait_share: float
    stall_seconds: float
    step_gain: float
    cumulative_gain: float
    """both in trained tokens a second, of the medians"""
    spread: float
    """of trained tokens a second over the repeats: (most - least) / median"""
    repeats: list[RunFigures]
    predicted_trained_tokens_per_second: float | None = None
    predicted_tokens_per_second: float | None = None
    predicted_learner_wait_share: float | None = None


Progress = Callable[[str], None]


def bench_ablation(
    folder: Path, *, load: AblationLoad, config: Path | None = None, overrides: Sequence[str] = (), progress: Progress
) -> dict[str, Any]:
    """Every row `load.repeats` times. `folder` keeps the runs; those measured before are not measured again.

    With `config` that run's own model, data and rewards are the load, and `load` says only how long to measure; without
    it the load is drawn.

    Raises:
        ConfigError: `folder` holds measurements of another load, a row's settings are none of a run, or one of
            `overrides` is what a row or the load sets.
    """
    plan = switches(load.async_steps)
    of_load = [] if config is not None else load.settings(folder)
    _refuse_own(overrides, [*of_load, *run_settings(folder, load), *(one for row in plan for one in row.settings)])
    shared = [*of_load, *run_settings(folder, load), *overrides]

    def settled(number: int, repeat: int) -> Config:
        laid = [setting for switch in plan[: number + 1] for setting in switch.settings]
        return load_config(config, [*shared, *laid, f"run.name=row_{number}_{repeat}"])

    configs = [settled(number, 0) for number in range(len(plan))]
    _same_load(folder, load, configs[0])
    if config is None:
        load.write(folder)
    measured: list[list[RunFigures]] = [[] for _ in plan]
    for repeat in range(load.repeats):  # rows take turns, so that a machine that changes does so for all
        for number, switch in enumerate(plan):
            progress(f"{switch.name}, {repeat + 1} of {load.repeats}")
            measured[number].append(measure(settled(number, repeat), load))
    rows = to_rows([switch.name for switch in plan], measured)
    progress("what the planner says")
    drawn = load.drawn() if config is None else None
    found = benchmarks(
        configs[0],
        drawn or recorded_load(configs[0].run.directory),
        folder=folder,
        quantizations=sorted({c.inference.quantization for c in configs if c.inference.quantization}),
    )
    for row, of_row in zip(rows, configs, strict=True):
        _predict(row, of_row, found, baseline=measured[0][0], drawn=drawn)
    return {
        "rows": [asdict(row) for row in rows],
        "load": asdict(load) | {"config": None if config is None else str(config)},
        "sharing": asdict(found.sharing),
    }


def run_settings(folder: Path, load: AblationLoad) -> list[str]:
    """Of every run that is measured, whatever its load."""
    return [
        f"run.output_dir={folder}",
        f"run.steps={ENDLESS}",
        f"checkpoint.every={ENDLESS}",
        "eval.every=0",
        f"inference.threads={load.threads}",
        f"learner.threads={load.threads}",
        "logging.console=false",
        "logging.rollouts=true",  # what a run was given is read from there
        "logging.wandb=disabled",
    ]


def _refuse_own(overrides: Sequence[str], own: Sequence[str]) -> None:
    """Settings that an ablation makes itself would count for nothing, or leave it without what it measures by."""
    keys = {setting.partition("=")[0] for setting in own}
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in keys:
            raise ConfigError(f"{key} is set by the ablation itself; leave it out")


def _same_load(folder: Path, load: AblationLoad, first: Config) -> None:
    """Whatever the settings came from: those of the first row are kept, and compared."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "ablation.json"
    measured = asdict(load)
    del measured["repeats"]  # more of them may be added
    text = json.dumps({"load": measured, "settings": first.model_dump(mode="json")}, indent=1) + "\n"
    if file.exists() and file.read_text() != text:
        raise ConfigError(f"{folder} holds measurements of another load ({file}); give another folder, or remove it")
    file.write_text(text)


def measure(config: Config, load: AblationLoad) -> RunFigures:
    """Of a run of so many seconds; read from its folder if it was measured before."""
    directory = config.run.directory
    file = directory / "figures.json"
    if file.exists():
        return RunFigures(**json.loads(file.read_text()))
    if directory.exists():
        shutil.rmtree(directory)  # of an ablation that was interrupted
    skip = config.rollout.async_steps + 1
    with Run(config) as run:
        run.start()
        started = time.monotonic()
        while run.version <= skip + load.steps or time.monotonic() - started < load.seconds:
            run.train_step(run.next_batch())
            run.publish()
            if run.version == skip:
                started = time.monotonic()
    # The row of the last step may be missing: it is written when its update is live.
    figures = read_figures(directory, skip=skip)
    log.info("%s: %s", directory.name, figures)
    file.write_text(json.dumps(asdict(figures), indent=1) + "\n")
    return figures


def to_rows(names: Sequence[str], measured: Sequence[list[RunFigures]]) -> list[Row]:
    rows: list[Row] = []
    for name, repeats in zip(names, measured, strict=True):

        def median(field: str, of: list[RunFigures] = repeats) -> float:
            return statistics.median(getattr(figures, field) for figures in of)

        trained = [figures.trained_tokens_per_second for figures in repeats]
        middle = statistics.median(trained)
        before = rows[-1].trained_tokens_per_second if rows else middle
        first = rows[0].trained_tokens_per_second if rows else middle
        rows.append(
            Row(
                name=name,
                tokens_per_second=median("tokens_per_second"),
                trained_tokens_per_second=middle,
                mfu=median("mfu"),
                mbu=median("mbu"),
                slot_waste=median("slot_waste"),
                learner_wait_share=median("learner_wait_share"),
                stall_seconds=median("stall_seconds"),
                step_gain=middle / before,
                cumulative_gain=middle / first,
                spread=(max(trained) - min(trained)) / middle,
                repeats=repeats,
            )
        )
    return rows


def _predict(row: Row, config: Config, found: Benchmarks, *, baseline: RunFigures, drawn: Load | None) -> None:
    """What an update costs is read from the first row, where no request is under way when one comes."""
    outcome = planned(
        config,
        load=drawn or recorded_load(config.run.directory),
        engine=found.engines[config.inference.quantization],
        learner=found.learner,
        updates=baseline,
        sharing=found.sharing,
        steps=max(figures.steps for figures in row.repeats),
    )
    row.predicted_trained_tokens_per_second = outcome.trained_tokens_per_second
    row.predicted_tokens_per_second = outcome.tokens_per_second
    row.predicted_learner_wait_share = outcome.learner_wait_share
