"""Do verifiers judge the rows of a source? A few rows are tried, in a process like those of a run."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from olmorl.cli.finding import Finding
from olmorl.config.data_sections import RewardSection, SourceSection
from olmorl.contract.errors import OlmoRLError
from olmorl.controller.scoring import verifier_settings, verifiers_to_load
from olmorl.data.dialect import Example, assign_verifiers
from olmorl.data.source import read_source
from olmorl.rewards.pool import VerifierPool
from olmorl.rewards.remote import is_remote
from olmorl.rewards.verdict import Verdict, VerifierJob

ROWS, OF = 8, 10_000  # so many, spread over the first so many
RESPONSES = ("", "I do not know \N{CROCODILE} \\boxed{}")  # beside the ground truth itself
SECONDS = 60.0  # for all verdicts on a source


@dataclass(frozen=True, slots=True)
class _Trial:
    place: str
    job: VerifierJob
    is_truth: bool


def load_verifiers(names: Sequence[str], reward: RewardSection) -> None:
    """As a run does it. Raises ConfigError, and WorkerError where importing them ends the process."""
    if names:
        asyncio.run(_judge([], names, reward))


def check_verdicts(source: SourceSection, reward: RewardSection) -> Iterator[Finding]:
    """Of a source whose first row can be read. Raising is told with file and line; who only asks another machine is
    asked once."""
    try:
        trials = _trials(source, reward)
        verdicts = asyncio.run(
            _judge([trial.job for trial in trials], {trial.job.verifier for trial in trials}, reward)
        )
    except OlmoRLError as error:
        yield Finding("fail", f"data {source.path}: {error}", "correct the path, the file or the verifier")
        return
    except TimeoutError:
        what = f"the verifiers of {source.path} did not judge {len(trials)} responses in {SECONDS:g} s"
        yield Finding("warn", what, "see what makes them slow; reward.timeout_seconds ends a single verdict")
        return
    by_verifier: defaultdict[str, list[tuple[_Trial, Verdict]]] = defaultdict(list)
    for trial, verdict in zip(trials, verdicts, strict=True):
        by_verifier[trial.job.verifier].append((trial, verdict))
    for name, judged in by_verifier.items():
        yield _finding(f"verifier {name}", judged, where=source.path)


def _finding(who: str, judged: Sequence[tuple[_Trial, Verdict]], *, where: str) -> Finding:
    """By the gravest of the verdicts."""
    for status, does, fix in (
        ("error", "fails at", "mend it; what is no answer should get 0: a sample without a score is not trained"),
        ("timeout", "is late with", "see what makes it slow, or raise reward.timeout_seconds"),
        ("unscorable", "cannot judge", "mend or remove such rows, or name another verifier"),
    ):
        found = [(trial, verdict) for trial, verdict in judged if verdict.status == status]
        if found:
            trial, verdict = found[0]
            count = f"all {len(judged)}" if len(found) == len(judged) else f"{len(found)} of {len(judged)}"
            at = f"at {trial.place}, response {trial.job.completion!r:.60}"
            what = f"{who} {does} {count} responses tried with {where}; {at}: {verdict.detail}"
            return Finding("warn" if len(found) < len(judged) and status != "unscorable" else "fail", what, fix)
    truths = [verdict.reward or 0.0 for trial, verdict in judged if trial.is_truth]
    mean = f"; ground truths as responses get {sum(truths) / len(truths):.3g}" if truths else ""
    return Finding("ok", f"{who} judges {len(judged)} responses tried with {where}{mean}")


def _trials(source: SourceSection, reward: RewardSection) -> list[_Trial]:
    """Raises ConfigError."""
    settings, trials, remote = verifier_settings(reward), [], set[str]()
    for place, example in _spread(read_source(source)):
        checks = example.checks
        if reward.verifier is not None:
            checks = assign_verifiers(checks, reward.verifier, place=place)
        verifiers_to_load(reward, [check.verifier for check in checks])
        for verifier, truth in checks:
            name = reward.remap.get(verifier or "", verifier or "")
            responses = [_as_text(truth), *RESPONSES]
            if is_remote(name, settings):
                responses = [] if name in remote else responses[:1]
                remote.add(name)
            for number, response in enumerate(responses):
                job = VerifierJob(
                    verifier=name,
                    completion=response,
                    ground_truth=truth,
                    prompt=_prompt(example),
                    num_tokens=len(response.split()),
                )
                trials.append(_Trial(place, job, is_truth=number == 0))
    return trials


def _spread(rows: Iterable[tuple[str, Example]]) -> list[tuple[str, Example]]:
    """From the first to the last, at equal distances."""
    there = list(islice(rows, OF))
    count = min(ROWS, len(there))
    return [there[i * (len(there) - 1) // max(1, count - 1)] for i in range(count)]


def _as_text(truth: object) -> str:
    """As a response might say it; of a list of right ones, the first."""
    if isinstance(truth, list | tuple) and truth:
        return _as_text(truth[0])
    return truth if isinstance(truth, str) else json.dumps(truth, default=str)


def _prompt(example: Example) -> str:
    prompt = example.prompt
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


async def _judge(jobs: Sequence[VerifierJob], names: Iterable[str], reward: RewardSection) -> list[Verdict]:
    settings = verifier_settings(reward)
    async with (
        VerifierPool(names, timeout_seconds=reward.timeout_seconds, settings=settings) as pool,
        asyncio.timeout(SECONDS),
    ):
        return await pool.score(jobs)
