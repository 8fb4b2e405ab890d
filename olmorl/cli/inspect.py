"""`olmorl inspect`: rollouts of a step or a prompt in the terminal, a group side by side."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from olmorl.contract.errors import ConfigError
from olmorl.dashboard.run_data import RunData
from olmorl.dashboard.samples import step_groups

_LIKELY = ((-0.1, ""), (-0.7, "yellow"), (-2.0, "dark_orange"), (float("-inf"), "bold red"))
_RATIO = ((2.0, "bold red"), (1.25, "dark_orange"), (1.05, "yellow"), (1 / 1.05, ""), (0.8, "cyan"), (0.5, "blue"))
_VERSIONS = ("", "cyan", "magenta", "green", "yellow", "blue")


def inspect(directory: Path, *, step: int | None, prompt: str | None, colour: str, limit: int) -> None:
    """Print the groups of `step` (else of the newest), or those of one prompt over all steps."""
    run = RunData(directory)
    steps = run.rollout_steps()
    if not steps:
        raise ConfigError(f"{directory} has no rollouts yet; with logging.rollouts = false it never will")
    if step is not None and step not in steps:
        raise ConfigError(f"{directory} has no rollouts of step {step}; there are steps {steps[0]} to {steps[-1]}")
    wanted = [step] if step is not None else steps if prompt is not None else steps[-1:]
    console = Console(highlight=False)
    shown = 0
    for number in wanted:
        for group in step_groups(run, number):
            if prompt is not None and group["prompt_id"] != prompt:
                continue
            if shown == limit:
                console.print(f"… more; --limit {2 * limit} shows them")
                return
            _show(console, group, step=number, colour=colours(colour))
            shown += 1
    if not shown:
        raise ConfigError(
            f"no rollouts of prompt {prompt!r} in {directory}; without --prompt the newest step is listed"
        )


def _show(console: Console, group: dict[str, Any], *, step: int, colour: Callable[[dict[str, Any], int], str]) -> None:
    mean = "unscored" if group["mean_reward"] is None else f"mean reward {group['mean_reward']:.3f}"
    source = f" · {group['source']}" if group["source"] else ""
    console.rule(f"step {step} · {group['prompt_id']}{source} · {mean}")
    console.print(group["prompt"], markup=False, style="dim")
    if group["ground_truth"]:
        console.print(f"ground truth: {group['ground_truth']}", markup=False, style="dim")
    console.print(Columns([_panel(sample, colour) for sample in group["samples"]], equal=True, expand=True))


def _panel(sample: dict[str, Any], colour: Callable[[dict[str, Any], int], str]) -> Panel:
    text = Text()
    for at, piece in enumerate(sample["tokens"]):
        text.append(piece, style=colour(sample, at))
    reward = sample["verdict"] if sample["reward"] is None else f"reward {sample['reward']:g}"
    facts = [reward, sample["fate"], sample["finish_reason"], f"{len(sample['tokens'])} tokens"]
    if sample["advantage"] is not None:
        facts.insert(1, f"advantage {sample['advantage']:+.2f}")
    if sample["detail"]:
        text.append(f"\n{sample['detail']}", style="dim italic")
    title = f"#{sample['sample']} · {sample['rollout_id']}"
    return Panel(text, title=title, subtitle=" · ".join(str(f) for f in facts if f), title_align="left")


def colours(colour: str) -> Callable[[dict[str, Any], int], str]:
    def by_logprob(sample: dict[str, Any], at: int) -> str:
        return next(style for least, style in _LIKELY if sample["logprobs"][at] >= least)

    def by_version(sample: dict[str, Any], at: int) -> str:
        return _VERSIONS[(sample["versions"][at] - sample["versions"][0]) % len(_VERSIONS)]

    def by_ratio(sample: dict[str, Any], at: int) -> str:
        ratio = sample["ratios"][at]
        if ratio is None:
            return "dim"
        return next((style for least, style in _RATIO if ratio >= least), "bold blue")

    styles = {"logprob": by_logprob, "version": by_version, "ratio": by_ratio, "none": lambda _sample, _at: ""}
    return styles[colour]
