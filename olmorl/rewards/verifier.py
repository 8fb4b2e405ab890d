"""The registry of verifiers, and how one is run so that whatever it does becomes a Verdict."""

import difflib
import importlib
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import cast, get_args

from olmorl.contract.errors import ConfigError
from olmorl.rewards.episode import EpisodePlayer, is_environment
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Status, Verdict, VerifierJob

STATUSES = get_args(Status)
OURS = (__file__, sys.modules[EpisodePlayer.__module__].__file__)  # between the process and what is the user's
MAX_ERROR = 300  # characters of an exception's message

Verifier = Callable[[str, object, str | None], object]
"""(completion, ground_truth, prompt) -> number, bool (0 or 1) or Verdict"""

BUILTIN = {
    "code": "olmorl.rewards.program:CodeVerifier",
    "code_stdio": "olmorl.rewards.program:CodeStdioVerifier",
    "flan": "olmorl.rewards.string_match:flan",
    "format": "olmorl.rewards.think_format:think_format",
    "gsm8k": "olmorl.rewards.gsm8k:gsm8k",
    "ifeval": "olmorl.rewards.ifeval:ifeval",
    "ifeval_old": "olmorl.rewards.ifeval:ifeval_old",
    "ifeval_strict": "olmorl.rewards.ifeval:ifeval_strict",
    "math": "olmorl.rewards.math_answer:MathVerifier",
    "max_length": "olmorl.rewards.response_length:max_length",
    "passthrough": "olmorl.rewards.passthrough:passthrough",
    "puzzle": "olmorl.rewards.string_match:puzzle",
    "re_search": "olmorl.rewards.string_match:search_match",
    "re_search_f1": "olmorl.rewards.string_f1:search_f1",
    "reasoning_gym": "olmorl.rewards.procedural:ProceduralVerifier",
    "regex": "olmorl.rewards.regex:regex",
    "strict_math": "olmorl.rewards.math_answer:StrictMathVerifier",
    "string_f1": "olmorl.rewards.string_f1:string_f1",
    "string_match": "olmorl.rewards.string_match:string_match",
    "string_matcher": "olmorl.rewards.string_match:string_matcher",
    "up_to_max_length": "olmorl.rewards.response_length:up_to_max_length",
}
"""by import path, so that a process loads only what it runs"""

JUDGES = {"judge": "judge", "rubric": "rubric"} | {
    f"general-{kind}": kind
    for kind in (
        "quality",
        "quality_ref",
        "quality_rubric",
        "safety",
        "factuality",
        "creative_writing",
        "refusal",
        "web_instruct_general_verifier",
    )
}
"""name -> what the judge is asked (olmorl.rewards.judge_prompts); these run on the event loop, for they only wait"""

ALIASES = {
    "math-lighteval": "math",
    "math-500": "math",
    "math500": "math",
    "math_dapo": "math",
    "aime": "math",
    "aime24": "math",
    "aime25": "math",
}
"""what data sets call their source, where that says how to score"""


def canonical_name(name: str) -> str:
    """`name` as the registry has it; a path of one's own stays as it is. Raises ConfigError, naming the nearest, for an
    unknown name.

    Data sets write their source before the name ("openai/gsm8k"). A path of one's own is not imported here: that may
    take long and pull in anything, and is left to the verifier's own process.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
            raise ConfigError(f"verifier {name!r} is not of the form my_module:my_function")
        return name
    short = name.rpartition("/")[2].lower()
    short = ALIASES.get(short, short)
    if short in BUILTIN or short in JUDGES:
        return short
    module, _, attribute = name.rpartition(".")
    own = "my_module:my_function" if not module else f"{module}:{attribute}"
    close = difflib.get_close_matches(short, [*BUILTIN, *JUDGES, *ALIASES], n=1, cutoff=0.4)
    hint = f" did you mean {close[0]!r}?" if close else ""
    known = ", ".join([*BUILTIN, *JUDGES])
    raise ConfigError(f"unknown verifier {name!r};{hint} one of your own is given as {own}; built in are {known}")


def find_verifier(name: str) -> str:
    """The import path of a verifier that runs in a process. Raises ConfigError."""
    canonical = canonical_name(name)
    return BUILTIN.get(canonical, canonical)


def choose_verifiers(named: Iterable[str | None]) -> tuple[str, ...]:
    """The names a run must load, of those that its rows name. Raises ConfigError if a row names none."""
    names = dict.fromkeys(named)
    if None in names:
        raise ConfigError(
            "the data names no verifier for its rows; set reward.verifier (olmorl eval: --verifier), or `verifier` of "
            "the data source, to one of "
            f"{', '.join([*BUILTIN, *JUDGES])}, or to one of your own as my_module:my_function"
        )
    return tuple(name for name in names if name is not None)


def check_keys(named: Iterable[str | None], *, weights: Iterable[str], remap: Mapping[str, str]) -> None:
    """Raises ConfigError for a key of reward.weights or reward.remap that is of no row, and so would do nothing."""
    rows = dict.fromkeys(name for name in named if name is not None)
    for old in remap:
        if old not in rows:
            raise ConfigError(f"reward.remap: no row names {old!r}; they name {', '.join(rows)}")
    judges = dict.fromkeys(remap.get(name, name) for name in rows)
    known = {canonical_name(name) for name in judges}
    for name in weights:
        if canonical_name(name) not in known:
            raise ConfigError(f"reward.weights: no row is judged by {name!r}; the verifiers are {', '.join(judges)}")


def load_verifier(path: str, settings: VerifierSettings | None = None) -> Verifier:
    """Import "module:attribute"; a class is instantiated, from the settings if it has `from_settings`.

    Raises ConfigError where the path is at fault; what the module itself raises at import comes through.
    """
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
    if is_environment(target):
        return EpisodePlayer(cast(type, target))
    if isinstance(target, type):
        from_settings = getattr(target, "from_settings", None)
        target = target() if from_settings is None else from_settings(settings or VerifierSettings())
    if not callable(target):
        raise ConfigError(f"verifier {path!r} is a {type(target).__name__}, which cannot be called")
    if (signature := _signature(target)) is not None:
        also = {"num_tokens": 0} if "num_tokens" in signature.parameters else {}
        try:
            signature.bind("completion", "ground truth", "prompt", **also)
        except TypeError:
            raise ConfigError(
                f"verifier {path!r} must take (completion, ground_truth, prompt); it takes {signature}"
            ) from None
    return target


def counts_tokens(verifier: Verifier) -> bool:
    signature = _signature(verifier)
    return signature is not None and "num_tokens" in signature.parameters


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # of something built in
        return None


def run_verifier(verifier: Verifier, job: VerifierJob) -> Verdict:
    """Judge one completion. An exception becomes an error verdict: it costs one sample, not the run."""
    try:
        if job.episode is not None:
            if isinstance(verifier, EpisodePlayer):
                return verifier.play(job)
            return Verdict(status="error", detail="not an environment: a class with `step` is one")
        if job.num_tokens is not None:  # set only for a verifier that counts
            counting = cast(Callable[..., object], verifier)
            return read_value(counting(job.completion, job.ground_truth, job.prompt, num_tokens=job.num_tokens))
        return read_value(verifier(job.completion, job.ground_truth, job.prompt))
    except (Exception, SystemExit) as error:
        return _check_verdict(_raised(error))


def _raised(error: BaseException) -> Verdict:
    """Says where in the verifier's own file; what it called there is in the traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in OURS]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    told = "".join(traceback.format_exception(error))
    return Verdict(status="error", detail=f"{type(error).__name__}: {error!s:.{MAX_ERROR}}{place}", traceback=told)


def read_value(value: object) -> Verdict:
    if isinstance(value, Verdict):
        return _check_verdict(value)
    if not isinstance(value, numbers.Real) and callable(item := getattr(value, "item", None)):
        value = item()  # a numpy bool, or an array or tensor of one number
    if not isinstance(value, numbers.Real):
        return Verdict(status="error", detail=f"the verifier returned {value!r:.200}, which is no number")
    reward = float(value)
    return Verdict(status="scored", reward=reward) if math.isfinite(reward) else _not_finite(reward)


def _check_verdict(verdict: Verdict) -> Verdict:
    """One of the user's may hold anything; what others rely on is a known status, a number, and text for UTF-8."""
    if verdict.status not in STATUSES:
        return Verdict(status="error", detail=f"the verifier returned the status {verdict.status!r:.200}")
    detail = _utf8(verdict.detail)
    if verdict.status != "scored":
        return replace(verdict, detail=detail, traceback=_utf8(verdict.traceback))
    read = read_value(verdict.reward)
    return replace(verdict, reward=read.reward, detail=detail) if read.status == "scored" else read


def _utf8(text: object) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode()


def _not_finite(reward: float) -> Verdict:
    return Verdict(status="error", detail=f"the verifier returned {reward}")
