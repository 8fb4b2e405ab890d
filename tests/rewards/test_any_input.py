"""No text and no ground truth makes a verifier of ours raise: what it cannot judge is unscorable."""

import functools
import inspect
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmorl.rewards.ifeval_instructions import INSTRUCTIONS
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import VerifierJob
from olmorl.rewards.verifier import BUILTIN, Verifier, load_verifier, run_verifier

PIECES = st.sampled_from(
    ["\\boxed{", "}", "{", "####", "$", "\\frac", "1", "2", ",", ".", "-", "/", "%", " ", "\n", "x", "=", "^", "(", ")",
     "[", "]", "\\{", "\\}", "<answer>", "</answer>", "<think>", "</think>", "<finish>", "</finish>", "```",
     "answer is ", "\\text{",
     "\\sqrt", "\\pi", "*", "٧", "½", "²", "\x00", "\ud800", "é", "e3", "\\circ", "\\le", "\\cup"]
)  # fmt: skip
TEXTS = st.one_of(st.lists(PIECES, max_size=12).map("".join), st.text(max_size=30))
HOSTILE = st.sampled_from(["[" * 100_000, "{" * 100_000, "(" * 100_000, "a{99999999999}", "1" * 5000, "nan", "1e999"])
TRUTHS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, HOSTILE),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
NAMES = [name for name in BUILTIN if name not in ("code", "code_stdio", "reasoning_gym")]


@functools.cache
def verifier(name: str) -> Verifier:
    return load_verifier(BUILTIN[name], VerifierSettings())


@pytest.mark.parametrize("name", NAMES)
def test_any_input_has_a_verdict(name: str) -> None:
    @given(completion=TEXTS, truth=TRUTHS)
    @settings(max_examples=40, deadline=None)
    def check(completion: str, truth: object) -> None:
        verdict = run_verifier(
            verifier(name), VerifierJob(verifier=name, completion=completion, ground_truth=truth, prompt=completion)
        )
        assert verdict.status in ("scored", "unscorable", "timeout"), verdict
        assert verdict.reward is None or 0.0 <= verdict.reward <= 1.0

    check()


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_any_arguments_of_an_instruction_have_a_verdict(name: str) -> None:
    """Text in place of a list, which would be a list of letters, is refused with all else that means nothing."""
    parameters = list(inspect.signature(INSTRUCTIONS[name]).parameters)[1:]

    @given(text=TEXTS, arguments=st.fixed_dictionaries({}, optional=dict.fromkeys(parameters, TRUTHS)))
    @settings(max_examples=40, deadline=None)
    def check(text: str, arguments: dict[str, object]) -> None:
        truth = {"instruction_id": [name], "kwargs": [arguments]}
        verdict = run_verifier(
            verifier("ifeval"), VerifierJob(verifier="ifeval", completion=text, ground_truth=truth, prompt="")
        )
        assert verdict.status in ("scored", "unscorable"), verdict
        if any(isinstance(arguments.get(key), str) for key in ("keywords", "forbidden_words", "options")):
            assert verdict.status == "unscorable"

    check()


REPEATED = [".", "1", " ", "\n", "\\boxed{", "\\boxed ", "{", "}", "<think>", "<answer>", "####", "$", "$a", "1,",
            "1/2 ", ".\"'", "*", "*a", "[", "answer is ", "-", "a-", "a'", "P.S", "```\n", "。", "\n \t", "<<a",
            "é"]  # fmt: skip
GOOD_ARGUMENTS: dict[str, object] = {
    "keywords": ["a"], "keyword": "a", "frequency": 1, "relation": "at least", "forbidden_words": ["z"], "letter": "a",
    "let_frequency": 1, "let_relation": "at least", "language": "en", "num_sentences": 1, "num_paragraphs": 1,
    "num_words": 1, "nth_paragraph": 1, "first_word": "a", "num_placeholders": 1, "postscript_marker": "P.S.",
    "num_bullets": 1, "num_highlights": 1, "section_spliter": "Section", "num_sections": 1, "prompt_to_repeat": "a",
    "end_phrase": "a", "capital_frequency": 1, "capital_relation": "at least",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_a_policy_repeats_without_end_is_judged_at_once(name: str) -> None:
    """A search that goes through a row of characters once for each of them would take hours over a megabyte."""
    truth: object = "72"
    if name.startswith("ifeval"):
        checks = INSTRUCTIONS.items()
        known = [
            {k: v for k, v in GOOD_ARGUMENTS.items() if k in inspect.signature(check).parameters} for _, check in checks
        ]
        truth = {"instruction_id": [instruction for instruction, _ in checks], "kwargs": known}
    for piece in REPEATED:
        completion = piece * (40_000 // len(piece)) + "x"
        began = time.process_time()
        verdict = run_verifier(
            verifier(name), VerifierJob(verifier=name, completion=completion, ground_truth=truth, prompt="p")
        )
        assert time.process_time() - began < 3.0, piece  # 24 s for one quadratic search
        assert verdict.status == "scored" or name == "ifeval_old", verdict


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_an_answer_against_itself_has_a_verdict(text: str) -> None:
    job = VerifierJob(verifier="math", completion=f"\\boxed{{{text}}}", ground_truth=f"${text}$")
    verdict = run_verifier(verifier("math"), job)
    assert verdict.status in ("scored", "unscorable", "timeout"), verdict
