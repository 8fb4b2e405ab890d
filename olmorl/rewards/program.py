"""Programs written by the model, judged by tests: assertions, or input and output.

The reward is the share of tests passed. A program that fails, hangs, eats memory or ends before its test is wrong; a
sandbox that fails says nothing about the program, and that is an error.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from olmorl.rewards.answer_text import last_fenced, without_thoughts
from olmorl.rewards.sandbox import Limits, Outcome, Program, SandboxError, run_programs
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Verdict, scored, unscorable

BUDGET_SHARE = 0.6  # of a verdict's deadline; the rest is for starting the sandbox on a busy machine


@dataclass(frozen=True, slots=True)
class IoTest:
    stdin: str
    expected: str


def read_source(completion: str) -> str:
    """The last fenced block behind the thoughts, or else all of it."""
    answer = without_thoughts(completion)
    fenced = last_fenced(answer)
    return answer if fenced is None else fenced


def read_assertions(ground_truth: object) -> list[str] | None:
    """A list of statements, or JSON of one. None: it is neither."""
    value = _from_json(ground_truth)
    if isinstance(value, str):
        value = [value]
    ok = isinstance(value, list | tuple) and value and all(isinstance(test, str) and test.strip() for test in value)
    return list(value) if ok else None  # type: ignore[call-overload]


def read_io_tests(ground_truth: object) -> list[IoTest] | None:
    """A list of {input, output}, or {inputs: [...], outputs: [...]}, or JSON of either. None: it is neither."""
    value = _from_json(ground_truth)
    if isinstance(value, dict) and "inputs" in value and "outputs" in value:
        inputs, outputs = value["inputs"], value["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            return None
        value = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    if not isinstance(value, list | tuple) or not value:
        return None
    tests = []
    for test in value:
        if not isinstance(test, dict) or "input" not in test or "output" not in test:
            return None
        tests.append(IoTest(_text(test["input"]), _text(test["output"])))
    return tests


def _from_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def same_output(output: str, expected: str) -> bool:
    """Line by line, word by word: how words are spaced and how the text ends does not matter."""
    return _words(output) == _words(expected)


def _words(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def share_passed(passed: Sequence[bool], *, threshold: float, why: str = "") -> Verdict:
    share = sum(passed) / len(passed)
    detail = f"{sum(passed)} of {len(passed)} tests" + (f"; {why}" if why else "")
    return scored(share if share >= threshold else 0.0, detail)


class CodeVerifier:
    """`code`: each assertion runs behind the program, in a process of its own."""

    def __init__(self, settings: VerifierSettings | None = None) -> None:
        settings = settings or VerifierSettings()
        self._threshold = settings.code_pass_threshold
        self._budget = settings.timeout_seconds * BUDGET_SHARE
        self._limits = Limits(
            cpu_seconds=settings.code_seconds,
            wall_seconds=min(10 * settings.code_seconds, self._budget),
            memory_mb=settings.code_memory_mb,
        )

    @classmethod
    def from_settings(cls, settings: VerifierSettings) -> "CodeVerifier":
        return cls(settings)

    def __call__(self, completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
        tests = read_assertions(ground_truth)
        if tests is None:
            return unscorable(f"the ground truth {ground_truth!r:.80} is no list of assertions")
        source = read_source(completion)
        if not source.strip():
            return scored(0.0, "no program in the completion")
        return self._judge([Program(f"{source}\n{test}\n") for test in tests], [None] * len(tests))

    def _judge(self, programs: list[Program], expected: Sequence[str | None]) -> Verdict:
        try:
            outcomes = run_programs(programs, limits=self._limits, budget_seconds=self._budget)
        except SandboxError as error:
            return Verdict(status="error", detail=str(error))
        passed = [_passes(outcome, wanted) for outcome, wanted in zip(outcomes, expected, strict=False)]
        failure = next((_describe(o) for o, ok in zip(outcomes, passed, strict=True) if not ok), "")
        if len(outcomes) < len(programs):
            failure = failure or "out of time"
        return share_passed(passed + [False] * (len(programs) - len(passed)), threshold=self._threshold, why=failure)


class CodeStdioVerifier(CodeVerifier):
    """`code_stdio`: what the program writes for each input."""

    def __call__(self, completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
        tests = read_io_tests(ground_truth)
        if tests is None:
            return unscorable(f"the ground truth {ground_truth!r:.80} is no list of inputs and outputs")
        source = read_source(completion)
        if not source.strip():
            return scored(0.0, "no program in the completion")
        return self._judge([Program(source, test.stdin) for test in tests], [test.expected for test in tests])


def _passes(outcome: Outcome, expected: str | None) -> bool:
    if expected is None:
        return outcome.finished
    return not outcome.exceeded and outcome.exit_code == 0 and same_output(outcome.stdout, expected)


def _describe(outcome: Outcome) -> str:
    if outcome.exceeded:
        return f"over the limit of {outcome.exceeded}"
    if outcome.exit_code < 0:
        return f"ended by signal {-outcome.exit_code}"
    lines = outcome.stderr.strip().splitlines()
    if outcome.exit_code:
        return lines[-1][:200] if lines else f"exit code {outcome.exit_code}"
    return "wrong output" if outcome.finished else "ended before its test"
