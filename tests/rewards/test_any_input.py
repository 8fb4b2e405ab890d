"""No text and no ground truth makes a verifier of ours raise: what it cannot judge is unscorable."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
TRUTHS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
NAMES = [name for name in BUILTIN if name not in ("code", "code_stdio", "reasoning_gym", "regex")]


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


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_an_answer_against_itself_has_a_verdict(text: str) -> None:
    job = VerifierJob(verifier="math", completion=f"\\boxed{{{text}}}", ground_truth=f"${text}$")
    verdict = run_verifier(verifier("math"), job)
    assert verdict.status in ("scored", "unscorable", "timeout"), verdict
