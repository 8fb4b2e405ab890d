"""Verifiers of words, length and form, and how several verdicts become one."""

import json

import pytest

from olmorl.rewards.combine import combine
from olmorl.rewards.passthrough import passthrough
from olmorl.rewards.response_length import max_length, up_to_max_length
from olmorl.rewards.string_f1 import search_f1, string_f1
from olmorl.rewards.string_match import flan, puzzle, search_match, string_matcher
from olmorl.rewards.think_format import think_format
from olmorl.rewards.verdict import Verdict, VerifierJob, scored, unscorable
from olmorl.rewards.verifier import counts_tokens, load_verifier, run_verifier


@pytest.mark.parametrize(
    ("verifier", "completion", "truth", "reward"),
    [
        (string_matcher, "so <answer> Paris. </answer>", "paris", 1.0),
        (string_matcher, "Paris", "Paris", 0.0),
        (string_matcher, "<answer>Rome</answer>", ["Paris", "Rome"], 1.0),
        (flan, "Because. The answer is: B.", "b", 1.0),
        (flan, "the ANSWER is: A. No: the answer is: B", "b", 1.0),
        (flan, "B", "b", 0.0),
        (flan, "The answer is: A", "b", 0.0),
        (puzzle, "<think>hm</think><answer>Red,  House(1)</answer>", "red house 1", 1.0),
        (puzzle, "red house 2", "red house 1", 0.0),
        (puzzle, "-1", "1", 0.0),
        (search_match, "<finish>Paris</finish>", '["Paris", "Lutetia"]', 1.0),
        (search_match, "<finish>lutetia</finish>", ["Paris", "Lutetia"], 1.0),
        (search_match, "Paris", "Paris", 0.0),
        (string_f1, "the city of Paris", "Paris city", 0.8),
        (string_f1, "A <answer>Paris!</answer>", "paris", 1.0),
        (string_f1, "Rome", ["Paris", "Rome"], 1.0),
        (string_f1, "Rome", "Paris", 0.0),
        (string_f1, "", "Paris", 0.0),
        (search_f1, "<finish>the city Paris</finish>", '["Paris"]', 2 / 3),
        (search_f1, "<finish>Rome</finish>", "Paris", 0.1),
        (search_f1, "Paris", "Paris", 0.0),
        (max_length, "a b c", 3, 1.0),
        (max_length, "a b c", "35", 1 - 32 / 32768),
        (max_length, "a " * 40_000, 0, 0.0),
        (up_to_max_length, "a b c", "35", 1.0),
        (up_to_max_length, "a b c", 1.0, 1 - 2 / 32768),
        (passthrough, "anything", None, 0.0),
    ],
)
def test_reward(verifier, completion: str, truth: object, reward: float) -> None:
    assert verifier(completion, truth).reward == pytest.approx(reward)


@pytest.mark.parametrize("verifier", [string_matcher, flan, puzzle, search_match, string_f1, search_f1])
@pytest.mark.parametrize("truth", [None, "", [], [None], " ... "])
def test_a_truth_without_words_is_unscorable(verifier, truth: object) -> None:
    assert verifier("<answer>x</answer>", truth).status == "unscorable"


@pytest.mark.parametrize("truth", [None, "many", -1, "nan", "inf", [3]])
def test_a_truth_that_is_no_length_is_unscorable(truth: object) -> None:
    assert max_length("x", truth).status == up_to_max_length("x", truth).status == "unscorable"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n</think>\n <answer>\nb\n</answer>\n", 1.0),
        ("<think></think><answer>b</answer>", 1.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think>b", 0.0),
        ("<answer>b</answer>", 0.0),
        ("x<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think>x<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>x", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer></think>b</answer>", 0.0),
        ("a</think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(completion: str, reward: float) -> None:
    assert think_format(completion).reward == reward


def test_thoughts_that_the_prompt_has_opened() -> None:
    assert think_format("a</think><answer>b</answer>", None, "q<think>\n").reward == 1.0
    assert think_format("<think>a</think><answer>b</answer>", None, "q<think>").reward == 1.0


def test_tokens_are_counted_where_they_are_known() -> None:
    job = VerifierJob(verifier="max_length", completion="a b", ground_truth=100, num_tokens=100)
    assert counts_tokens(max_length) and not counts_tokens(string_f1) and not counts_tokens(len)
    assert run_verifier(load_verifier("olmorl.rewards.response_length:max_length"), job).reward == 1.0


@pytest.mark.parametrize("text", ["<answer>" * 125_000, "</finish>" * 100_000, "a " * 500_000, "\x00" * 10**6])
@pytest.mark.timeout(20)
def test_a_megabyte_is_no_trouble(text: str) -> None:
    for verifier in (string_matcher, flan, puzzle, search_match, string_f1, search_f1, think_format):
        assert verifier(text, "x").reward == 0.0


def test_combine() -> None:
    names = ("a", "b")
    assert combine([scored(0.5, "why")], [1.0], names=["a"]) == scored(0.5, "why")
    assert combine([scored(0.5)], [3.0], names=["a"]).reward == 1.5
    both = combine([scored(1.0, "x"), scored(0.5)], [1.0, -2.0], names=names)
    assert both == scored(0.0, "a 1 (x), b 0.5")
    late, broken = Verdict(status="timeout", detail="l"), Verdict(status="error", detail="e")
    for parts, status, detail in [
        ([scored(1.0), late], "timeout", "b: l"),
        ([late, broken], "error", "b: e"),
        ([unscorable("u"), late], "timeout", "b: l"),
        ([unscorable("u"), scored(1.0)], "unscorable", "a: u"),
    ]:
        verdict = combine(parts, [1.0, 1.0], names=names)
        assert (verdict.status, verdict.reward, verdict.detail) == (status, None, detail)


def test_reasoning_gym_scores_its_own_entries() -> None:
    gym = pytest.importorskip("reasoning_gym")
    verifier = load_verifier("olmorl.rewards.procedural:ProceduralVerifier")
    entry = json.loads(json.dumps(gym.create_dataset("chain_sum", size=1, seed=3)[0]))
    assert (
        run_verifier(
            verifier, VerifierJob(verifier="", completion=f"<answer>{entry['answer']}</answer>", ground_truth=entry)
        ).reward
        == 1.0
    )
    for wrong in ("<answer>no</answer>", ""):
        assert run_verifier(verifier, VerifierJob(verifier="", completion=wrong, ground_truth=entry)).reward < 1.0
    for bad in (None, "3", {"answer": "3"}):
        assert run_verifier(verifier, VerifierJob(verifier="", completion="3", ground_truth=bad)).status == "unscorable"
