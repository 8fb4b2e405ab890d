import json
import os
from pathlib import Path

import pytest

from olmorl.contract.errors import ConfigError
from olmorl.rewards.gsm8k import gsm8k, last_number
from olmorl.rewards.regex import regex
from olmorl.rewards.string_match import string_match
from olmorl.rewards.verifier import BUILTIN, canonical_name, choose_verifiers, find_verifier, load_verifier

GSM8K = Path(os.environ.get("OLMORL_TEST_GSM8K", ""))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("The answer is 72.", "72"),
        ("first 5 and then 72", "72"),
        ("#### 72", "72"),
        ("<<48/2=24>>24 clips", "24"),
        ("1,234", "1234"),
        ("$1,234,567.50", "1234567.5"),
        ("12,34,567 rupees", "1234567"),
        ("one of 1,2,3", "3"),
        ("the pair (4,-5)", "-5"),
        ("-5", "-5"),
        ("x = -5.", "-5"),
        ("x=-5", "-5"),
        ("−5", "-5"),
        ("+5", "5"),
        ("5-3", "3"),
        ("10 - 4", "4"),
        ("(7)-3", "3"),
        ("pages 5-10", "10"),
        ("3.50", "3.5"),
        ("3.50.", "3.5"),
        ("it is .5", "0.5"),
        ("-.5", "-0.5"),
        ("$18", "18"),
        ("-$18", "-18"),
        ("$-18", "-18"),
        ("\\$18", "18"),
        ("50%", "50"),
        ("-50 %", "-50"),
        ("**72**", "72"),
        ("\\boxed{72}", "72"),
        ("72 apples, in words: seventy-two", "72"),
        ("٧٢", "72"),
        ("７２", "72"),
        ("1/2", "2"),
        ("seventy-two", None),
        ("", None),
        ("...", None),
        ("$", None),
        ("-", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    found = last_number(text)
    assert found is None if number is None else found == last_number(number) and float(found) == float(number)


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        ("so 72", "72", 1.0),
        ("so 72.0", "72", 1.0),
        ("so 1,000", "1000", 1.0),
        ("so 1000", "1,000", 1.0),
        ("so 72", 72, 1.0),
        ("so 72", "#### 72", 1.0),
        ("so $0.5", "0.50", 1.0),
        ("so 71", "72", 0.0),
        ("so -72", "72", 0.0),
        ("72 and 73", "72", 0.0),
        ("no idea", "72", 0.0),
        ("", "72", 0.0),
        ("9" * 400, "1", 0.0),
        ("9" * 400 + ".0", "9" * 400, 1.0),
    ],
)
def test_gsm8k(completion: str, truth: object, reward: float) -> None:
    verdict = gsm8k(completion, truth)
    assert (verdict.status, verdict.reward) == ("scored", reward)


def test_gsm8k_without_a_number_in_the_truth_is_unscorable() -> None:
    assert gsm8k("72", "many").status == "unscorable"


@pytest.mark.parametrize("text", ["1" + ",234" * 250_000 + "5", "1 " * 500_000, "1" * 10**6, "-" * 10**6, "$" * 10**6])
@pytest.mark.timeout(20)
def test_gsm8k_takes_a_megabyte_in_its_stride(text: str) -> None:
    assert gsm8k(text, "7").reward == 0.0


@pytest.mark.skipif(not GSM8K.is_file(), reason="OLMORL_TEST_GSM8K names no gsm8k_train.jsonl")
def test_every_gsm8k_solution_is_right_for_its_own_answer_alone() -> None:
    for line in GSM8K.read_text().splitlines():
        solution = json.loads(line)["answer"]
        label = solution.rpartition("####")[2].strip()
        assert gsm8k(solution, label).reward == 1.0
        assert gsm8k(solution, label + "1").reward == 0.0


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        (" Paris.\n", "paris", 1.0),
        ("I think <answer>Rome</answer>, no, <answer> PARIS </answer>!", "Paris", 1.0),
        ('"Paris"', "Paris", 1.0),
        ("new   york", "New York", 1.0),
        ("ﬁve", "five", 1.0),
        ("5", ["6", "5"], 1.0),
        ("5", 5, 1.0),
        ("-5", "5", 0.0),
        ("It is Paris", "Paris", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_string_match(completion: str, truth: object, reward: float) -> None:
    assert string_match(completion, truth).reward == reward


def test_regex() -> None:
    assert regex("the ANSWER is 7", r"(?i)answer is \d$").reward == 1.0
    assert regex("the answer is", r"answer is \d$").reward == 0.0
    assert regex("x", "(").status == regex("x", None).status == "unscorable"
    assert string_match("x", []).status == "unscorable"


def test_names() -> None:
    assert find_verifier("openai/gsm8k") == find_verifier("GSM8K") == BUILTIN["gsm8k"]
    for name, path in BUILTIN.items():
        if name != "reasoning_gym":  # needs an optional package
            assert callable(load_verifier(path))
    assert (
        canonical_name("general-quality_ref") == "general-quality_ref"
        and canonical_name("HuggingFaceH4/MATH-500") == "math"
    )
    with pytest.raises(ConfigError, match="did you mean 'general-safety'"):
        canonical_name("general-safty")
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        find_verifier("gsm8")
    with pytest.raises(ConfigError, match=r"one of your own .*up_to_max_length, judge"):
        find_verifier("???")
    with pytest.raises(ConfigError, match="my_module:my_function"):
        find_verifier("a b:c")
    assert choose_verifiers(["a", "b", "a"]) == ("a", "b")
    with pytest.raises(ConfigError, match=r"reward\.verifier"):
        choose_verifiers(["a", None])
