"""From a prompt's checks to one verdict for each sample."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from olmorl.config.data_sections import RewardSection, SourceSection
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import FinishReason, RolloutSample
from olmorl.controller.group import Group, ScoredSample
from olmorl.controller.scoring import Scorer, full_reward, verifier_settings, verifiers_to_load
from olmorl.data.prompt import Check, Prompt
from olmorl.data.source import read_source
from olmorl.rewards.verifier import check_keys


def prompt(*checks: Check) -> Prompt:
    return Prompt(
        index=0,
        token_ids=np.array([1], np.int32),
        text="q",
        checks=checks,
        data_source="s",
        epoch=0,
        position=0,
    )


def sample(index: int, text: str, *, finish_reason: FinishReason = "stop") -> RolloutSample:
    return RolloutSample(
        request_id="0_0",
        lease=1,
        sample_index=index,
        worker="w",
        token_ids=np.arange(5, dtype=np.int32),
        logprobs=np.zeros(5, np.float32),
        raw_logprobs=np.zeros(5, np.float32),
        version_spans=((0, 0, 5),),
        text=text,
        finish_reason=finish_reason,
    )


def score(section: RewardSection, asked: Prompt, *samples: RolloutSample) -> list[ScoredSample]:
    async def main() -> list[ScoredSample]:
        names = verifiers_to_load(section, [check.verifier for check in asked.checks])
        scorer = await Scorer.start(section, verifiers=names)
        try:
            return await scorer.score(asked, samples)
        finally:
            await scorer.close()

    return asyncio.run(main())


@pytest.mark.parametrize("task", ["chain_sum", "ransom_note", "gcd", "word_sorting"])
def test_rows_of_a_procedural_task_are_judged_by_its_own_scorer(task: str) -> None:
    """From the source as a config names it to the verdict of the verifier's process: what the task itself says."""
    gym = pytest.importorskip("reasoning_gym")
    [(_, row)] = read_source(SourceSection(path=f"reasoning_gym:{task}", limit=1, options={"seed": 3}))
    made = gym.create_dataset(task, size=1, seed=3)
    answer = made[0]["answer"]
    answers = [answer, f"I think {answer}", "", "no"]
    samples = [sample(i, f"<answer>{text}</answer>") for i, text in enumerate(answers)]
    scored = score(RewardSection(), prompt(*row.checks), *samples)
    assert [s.verdict for s in scored] == ["scored"] * len(answers)
    assert [s.reward for s in scored] == [made.score_answer(text, made[0]) for text in answers]
    assert scored[0].reward == 1.0 and scored[3].reward == min(s.reward or 0.0 for s in scored)


def test_several_verifiers_are_added_by_weight() -> None:
    asked = prompt(Check("gsm8k", "7"), Check("old_format", None), Check("max_length", 5))
    section = RewardSection(weights={"gsm8k": 2.0, "format": 0.5}, remap={"old_format": "format"})
    texts = ("<think>a</think><answer>7</answer>", "7", "8")
    scored = score(section, asked, *(sample(i, text) for i, text in enumerate(texts)))
    assert [s.reward for s in scored] == [3.5, 3.0, 1.0]


@pytest.mark.parametrize(
    ("weights", "thoughtless", "full"),
    [({}, 1.0, 2.0), ({"format": 0.5}, 1.0, 1.5), ({"gsm8k": 0.6, "format": 0.4}, 0.6, 1.0)],
)
def test_who_satisfies_one_of_two_verifiers_has_not_passed(
    weights: dict[str, float], thoughtless: float, full: float
) -> None:
    """Else a row that nobody solves, but all answer in the right form, would be retired as solved."""
    section = RewardSection(weights=weights)
    checks = (Check("openai/gsm8k", "7"), Check("format", None))
    asked = replace(prompt(*checks), full_reward=full_reward(section, checks))
    assert asked.full_reward == pytest.approx(full)
    both, answer, form = "<think>a</think><answer>7</answer>", "7", "<think>a</think><answer>8</answer>"
    group = Group(prompt=asked, order=0, admitted_version=0, seed=0, t_admitted=0.0)
    group.samples = score(section, asked, *(sample(i, text) for i, text in enumerate((both, answer, form))))
    assert group.samples[1].reward == thoughtless
    assert group.passed == [True, False, False] and group.pass_rate == 1 / 3


def test_what_is_full_takes_no_account_of_rounding_and_penalties() -> None:
    thirds = RewardSection(weights={"gsm8k": 0.6, "format": 0.3, "regex": 0.1, "puzzle": -1.0}, remap={"mine": "regex"})
    checks = [Check(name, "7") for name in ("gsm8k", "format", "mine", "puzzle")]
    asked = replace(prompt(), full_reward=full_reward(thirds, checks))
    assert asked.is_passed_by(1.0) and asked.is_passed_by(0.6 + 0.3 + 0.1) and not asked.is_passed_by(0.9)


def test_one_failure_leaves_the_sample_without_a_reward() -> None:
    asked = prompt(Check("gsm8k", "7"), Check("regex", "("))
    good, aborted = score(RewardSection(), asked, sample(0, "7"), sample(1, "7", finish_reason="abort"))
    assert (good.verdict, good.reward) == ("unscorable", None) and good.detail.startswith("regex: ")
    assert (aborted.verdict, aborted.reward, aborted.detail) == ("error", None, "aborted by the engine")


def test_a_verdict_that_is_no_score_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    score(RewardSection(), prompt(Check("regex", "(")), sample(0, "a"), sample(1, "b"))
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith("0_0: regex: verdict 'unscorable' (") and message.endswith("such samples are not trained")
    caplog.clear()
    score(RewardSection(on_unscorable="zero"), prompt(Check("regex", "(")), sample(0, "a"))
    assert caplog.records[-1].getMessage().endswith("such samples count as 0")


def test_each_verifier_that_fails_is_told_of_once_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = "def one(completion, truth, prompt):\n    return int(completion)\ndef two(*asked):\n    return 1 / 0\n"
    (tmp_path / "two_broken.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = prompt(Check("two_broken:one", None), Check("two_broken:two", None))
    score(RewardSection(), asked, sample(0, "a"), sample(1, "b"))
    said = {record.getMessage().split(" ")[1]: record.traceback for record in caplog.records}  # type: ignore[attr-defined]
    assert sorted(said) == ["two_broken:one:", "two_broken:two:"] and len(caplog.records) == 2
    assert "in one\n" in said["two_broken:one:"] and "ZeroDivisionError" in said["two_broken:two:"]


def test_what_does_not_fit_is_said_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"reward\.verifier"):
        verifiers_to_load(RewardSection(), ["gsm8k", None])
    with pytest.raises(ConfigError, match=r"reward\.weights: no row is judged by 'math'; the verifiers are gsm8k"):
        check_keys(["gsm8k"], weights=["math"], remap={})
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        check_keys(["gsm8k"], weights=["maths"], remap={})
    with pytest.raises(ConfigError, match=r"reward\.remap: no row names 'gsm8k'; they name openai/gsm8k"):
        check_keys(["openai/gsm8k"], weights=[], remap={"gsm8k": "math"})
    check_keys(["openai/gsm8k"], weights=["math"], remap={"openai/gsm8k": "math"})
    remapped = RewardSection(remap={"mine": "regex"})
    assert verifiers_to_load(remapped, ["mine", "regex", "puzzle"]) == ("regex", "puzzle")
    with pytest.raises(ConfigError, match="unknown verifier 'mine'"):
        verifiers_to_load(RewardSection(), ["mine"])


def test_what_the_config_leaves_open_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_API_URL", "http://code")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://judge")
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    settings = verifier_settings(RewardSection(judge_url="http://mine", judge_model="m", code_seconds=3.0))
    assert (settings.code_api_url, settings.judge_url, settings.code_seconds) == ("http://code", "http://mine", 3.0)
    assert settings.judge_api_key == "s3cret" and "s3cret" not in repr(settings)
