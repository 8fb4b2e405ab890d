"""`olmorl inspect`: rollouts of a step or a prompt in the terminal, a group side by side."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from olmorl.contract.errors import ConfigError
from olmorl.dashboard.run_data import RolloutsOf, RunData
from olmorl.dashboard.samples import read_group, step_groups

_LIKELY = ((-0.1, ""), (-0.7, "yellow"), (-2.0, "dark_orange"), (float("-inf"), "bold red"))
_RATIO = ((2.0, "bold red"), (1.25, "dark_orange"), (1.05, "yellow"), (1 / 1.05, ""), (0.8, "cyan"), (0.5, "blue"))
_VERSIONS = ("", "cyan", "magenta", "green", "yellow", "blue")
_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def inspect(
    directory: Path, *, step: int | None, prompt: str | None, colour: str, limit: int, of: RolloutsOf = "rollouts"
) -> None:
    """Print the groups of `step` (else of the newest), or those of one prompt over all steps; with `of` "evals" those
    of evaluations."""
    run = RunData(directory)
    steps, what = run.rollout_steps(of), "rollouts" if of == "rollouts" else "evaluations"
    if not steps:
        why = _why_none(run) if of == "rollouts" else " yet; with logging.rollouts = false it never will"
        raise ConfigError(f"{directory} has no {what}{why}")
    if step is not None and step not in steps:
        raise ConfigError(f"{directory} has no {what} of step {step}; there are {_steps(steps)}")
    wanted = [step] if step is not None else steps if prompt is not None else steps[-1:]
    console = Console(highlight=False)
    shown = 0
    for number in wanted:
        for group in step_groups(run, number, of):
            if prompt is not None and group["prompt_id"] != prompt:
                continue
            if shown == limit:
                console.print(f"… more; --limit {2 * limit} shows them")
                return
            where = f"step {number}" if of == "rollouts" else f"evaluation of version {number}"
            _show(console, read_group(run, number, group["prompt_id"], of), where=where, colour=colours(colour))
            shown += 1
    if not shown:
        others = "; those of evaluations are shown with --eval" if of == "rollouts" else ""
        raise ConfigError(
            f"no {what} of prompt {prompt!r} in {directory}; without --prompt the newest step is listed{others}"
        )


def _why_none(run: RunData) -> str:
    file = run.directory / "config.toml"
    config = tomllib.loads(file.read_text()) if file.exists() else {}
    if not config.get("logging", {}).get("rollouts", True):
        return ": logging.rollouts = false in its config"
    run.refresh()
    why = " yet: samples are written with the step that is trained next, and none is so far"
    if reason := run.summary.get("exit_reason"):
        why = f": it ended before a step was trained ({reason})"
    return why + (". Samples of its evaluations: --eval" if run.rollout_steps("evals") else "")


def _steps(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 8 else "steps " + ", ".join(map(str, steps))


def printable(text: str) -> str:
    """With pictures in place of control characters: a model may write what a terminal would obey."""
    return text.translate(_CONTROLS)


def _show(console: Console, group: dict[str, Any], *, where: str, colour: Callable[[dict[str, Any], int], str]) -> None:
    mean = "unscored" if group["mean_reward"] is None else f"mean reward {group['mean_reward']:.3f}"
    source = f" · {printable(group['source'])}" if group["source"] else ""
    console.rule(Text(f"{where} · {group['prompt_id']}{source} · {mean}"))
    console.print(printable(group["prompt"]), markup=False, style="dim")
    if group["ground_truth"]:
        console.print(f"ground truth: {printable(group['ground_truth'])}", markup=False, style="dim")
    console.print(Columns([_panel(sample, colour) for sample in group["samples"]], equal=True, expand=True))


def _panel(sample: dict[str, Any], colour: Callable[[dict[str, Any], int], str]) -> Panel:
    reward = sample["verdict"] if sample["reward"] is None else f"reward {sample['reward']:g}"
    advantage = None if sample["advantage"] is None else f"advantage {sample['advantage']:+.2f}"
    facts = [reward, advantage, sample["fate"], sample["finish_reason"], f"{len(sample['tokens'])} tokens"]
    text = Text.assemble((" · ".join(fact for fact in facts if fact), "dim"), "\n")
    for at, piece in enumerate(sample["tokens"]):
        text.append(printable(piece), style=colour(sample, at))
    if sample["detail"]:
        text.append(f"\n{printable(sample['detail'])}", style="dim italic")
    title = Text(f"#{sample['sample']} · {sample['rollout_id']}")
    return Panel(text, title=title, title_align="left")


def colours(colour: str) -> Callable[[dict[str, Any], int], str]:
    def by_logprob(sample: dict[str, Any], at: int) -> str:
        logprob = sample["logprobs"][at]
        if logprob is None:
            return "bold red"
        return next(style for least, style in _LIKELY if logprob >= least)

    def by_version(sample: dict[str, Any], at: int) -> str:
        return _VERSIONS[(sample["versions"][at] - sample["versions"][0]) % len(_VERSIONS)]

    def by_ratio(sample: dict[str, Any], at: int) -> str:
        ratio = sample["ratios"][at]
        if ratio is None:
            return "dim"
        return next((style for least, style in _RATIO if ratio >= least), "bold blue")

    styles = {"logprob": by_logprob, "version": by_version, "ratio": by_ratio, "none": lambda _sample, _at: ""}
    return styles[colour]
