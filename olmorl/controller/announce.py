"""What a run says before it is heard of again: where everything of it goes, and what starts now."""

import sys
from collections.abc import Mapping

from olmorl.config.schema import Config
from olmorl.controller.compose import Inputs
from olmorl.controller.run_directory import RunDirectory


def announce(
    config: Config, inputs: Inputs, *, directory: RunDirectory, where: str, attempt: int, resumed_from: str
) -> None:
    """`where`: which workers start, or on which cluster. `resumed_from`: the checkpoint an attempt goes on from, or
    nothing."""
    rollout = config.rollout
    begins = f", going on from {resumed_from}" if resumed_from else ""
    if attempt > 1 and not resumed_from:
        begins = f", from the start: attempt {attempt - 1} left no complete checkpoint"
    for line in (
        f"run directory: {directory.path}",
        f"{config.run.steps} steps of {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples, from "
        f"{len(inputs.train):,} prompts{begins}",
        f"starting {where}; logs in {directory.logs(attempt)}",
        *(
            f"evaluation set {one.name}: {len(one.prompts):,} prompts, k = {one.samples_per_prompt}"
            for one in inputs.eval
        ),
    ):
        _say(line)


def announce_peaks(peaks: Mapping[str, str]) -> None:
    """What MFU and MBU are shares of, by role."""
    for role, peak in peaks.items():
        _say(f"peak of a device of {role}: {peak}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
