"""The registry of verifiers, and how one is run so that whatever it does becomes a Verdict."""

import difflib
import importlib
import math
import numbers
from collections.abc import Callable, Iterable

from olmorl.contract.errors import ConfigError
from olmorl.rewards.verdict import Verdict, VerifierJob

Verifier = Callable[[str, object, str | None], object]
"""(completion, ground_truth, prompt) -> number, bool (0 or 1) or Verdict"""

BUILTIN = {
    "gsm8k": "olmorl.rewards.gsm8k:gsm8k",
    "regex": "olmorl.rewards.regex:regex",
    "string_match": "olmorl.rewards.string_match:string_match",
}
"""by import path, so that a process loads only what it runs"""


def find_verifier(name: str) -> str:
    """The import path that `name` stands for. Raises ConfigError, naming the nearest, for an unknown name.

    Data sets write their source before the name ("openai/gsm8k"). A path of one's own is not imported here: that may
    take long and pull in anything, and is left to the verifier's own process.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
            raise ConfigError(f"verifier {name!r} is not of the form my_module:my_function")
        return name
    short = name.rpartition("/")[2].lower()
    if short in BUILTIN:
        return BUILTIN[short]
    close = difflib.get_close_matches(short, BUILTIN, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"unknown verifier {name!r}; {hint}known are {', '.join(BUILTIN)}, or one of your own as my_module:my_function"
    )


def choose_verifiers(setting: str | None, rows: Iterable[str | None]) -> tuple[str, ...]:
    """The names a run must load: reward.verifier for all rows, or else what each row names."""
    if setting is not None:
        return (setting,)
    names = dict.fromkeys(rows)
    if None in names:
        raise ConfigError(
            "the data names no verifier for its rows; set reward.verifier to one of "
            f"{', '.join(BUILTIN)}, or to one of your own as my_module:my_function"
        )
    return tuple(name for name in names if name is not None)


def load_verifier(path: str) -> Verifier:
    """Import "module:attribute"; a class is instantiated. Raises ConfigError where the path is at fault; what the
    module itself raises at import comes through."""
    module_name, _, attribute = path.partition(":")
    try:
        target: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"verifier {path!r}: there is no module {error.name!r} on the Python path; start from the folder that "
            "holds it, or install it"
        ) from None
    for part in attribute.split("."):
        if not hasattr(target, part):
            close = difflib.get_close_matches(part, dir(target), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"verifier {path!r}: {module_name} has no {part!r}{hint}")
        target = getattr(target, part)
    if isinstance(target, type):
        target = target()
    if not callable(target):
        raise ConfigError(f"verifier {path!r} is a {type(target).__name__}, which cannot be called")
    return target


def run_verifier(verifier: Verifier, job: VerifierJob) -> Verdict:
    """Judge one completion. An exception becomes an error verdict: it costs one sample, not the run."""
    try:
        return read_value(verifier(job.completion, job.ground_truth, job.prompt))
    except (Exception, SystemExit) as error:
        return Verdict(status="error", detail=f"{type(error).__name__}: {error}")


def read_value(value: object) -> Verdict:
    if isinstance(value, Verdict):
        return value if value.reward is None or math.isfinite(value.reward) else _not_finite(value.reward)
    if not isinstance(value, numbers.Real) and callable(item := getattr(value, "item", None)):
        value = item()  # a numpy bool, or an array or tensor of one number
    if not isinstance(value, numbers.Real):
        return Verdict(status="error", detail=f"the verifier returned {value!r:.200}, which is no number")
    reward = float(value)
    return Verdict(status="scored", reward=reward) if math.isfinite(reward) else _not_finite(reward)


def _not_finite(reward: float) -> Verdict:
    return Verdict(status="error", detail=f"the verifier returned {reward}")
