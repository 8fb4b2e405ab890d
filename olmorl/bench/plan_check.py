"""Whether the planner is right on this machine: runs of different kinds on the real system beside what it says of them.

Two short benchmarks, of the engine and of the learner, are all it knows of the machine; what an update costs it reads
from the runs. The set-ups differ in slots, group size, lengths, asynchronous steps and the mode of updates.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from olmorl.bench.ablation import AblationLoad, measure, run_settings
from olmorl.bench.calibrate import benchmarks
from olmorl.config.load import load_config
from olmorl.planner.check import Compared, compare


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    load: dict[str, Any]
    """fields of the load that differ"""
    settings: tuple[str, ...]


KINDS = (
    Kind("synchronous", {}, ("rollout.async_steps=0", "sync.mode=drain")),
    Kind("asynchronous", {}, ("rollout.async_steps=2",)),
    Kind("half_the_slots", {"slots": 8}, ("rollout.async_steps=1",)),
    Kind("large_groups", {"samples_per_prompt": 8, "prompts_per_step": 4}, ("rollout.async_steps=1",)),
    Kind("short_responses", {"longest": 128}, ("rollout.async_steps=4",)),
    Kind("paused_updates", {"zero_variance": 0.2}, ("rollout.async_steps=1", "sync.mode=pause")),
)


def bench_plan_check(folder: Path, *, load: AblationLoad, progress: Callable[[str], None]) -> list[Compared]:
    """`folder` keeps runs and benchmarks; what was measured before is not measured again."""
    folder.mkdir(parents=True, exist_ok=True)
    runs, configs = [], []
    for kind in KINDS:
        of_kind = replace(load, **kind.load)
        files = folder / f"load_{kind.name}"
        of_kind.write(files)
        settings = [*of_kind.settings(files), *run_settings(folder, of_kind), *kind.settings, f"run.name={kind.name}"]
        configs.append(load_config(None, settings))
        progress(kind.name)
        measure(configs[-1], of_kind)
        runs.append(configs[-1].run.directory)
    progress("benchmarks of engine and learner")
    found = benchmarks(configs[1], load.drawn(), folder=folder)
    return compare(runs, engine=found.engines[None], learner=found.learner, sharing=found.sharing)
