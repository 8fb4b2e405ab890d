"""explain_sampling against the vectors of the sampler, a brute force over rules, and the sampler's own logprobs."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference import LLM, SamplingParams, explain_sampling


def logits_of(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


@pytest.mark.parametrize(
    ("probabilities", "rules", "removed"),
    [
        ((0.5, 0.25, 0.125, 0.125), {"top_p": 0.75}, {"top_p": (2, 3)}),
        ((0.5, 0.25, 0.15, 0.1), {"top_k": 2, "top_p": 0.6}, {"top_k": (2, 3), "top_p": (1,)}),
        ((0.4, 0.3, 0.2, 0.1), {"min_p": 0.6, "top_p": 0.5}, {"top_p": (2, 3), "min_p": ()}),
        ((0.1, 0.6, 0.3), {"temperature": 0}, {"greedy": (0, 2)}),
        ((0.1, 0.6, 0.3), {"temperature": 2.0}, {}),
        ((0.1, 0.6, 0.3), {"min_tokens": 2, "stop_token_ids": (0,)}, {"min_tokens": (0, 1)}),
        ((0.1, 0.6, 0.3), {"min_tokens": 2, "stop_token_ids": (0,), "ignore_eos": True}, {"min_tokens": (0,)}),
    ],
)
def test_which_rule_removes_which_token(
    probabilities: tuple[float, ...], rules: dict[str, float], removed: dict[str, tuple[int, ...]]
) -> None:
    found = explain_sampling(logits_of(*probabilities), SamplingParams(**rules), eos_token_ids=(1,))  # type: ignore[arg-type]
    assert found.removed == removed
    gone = {token for tokens in removed.values() for token in tokens}
    assert set(np.flatnonzero(found.probabilities == 0).tolist()) == gone
    assert found.probabilities.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(found.raw_logprobs, np.log(probabilities), atol=1e-6)


def test_penalties_move_logits_and_remove_nothing() -> None:
    params = SamplingParams(repetition_penalty=2, frequency_penalty=0.1, presence_penalty=0.2)
    found = explain_sampling([2.0, -1, 0.5, 0], params, prompt_token_ids=[0, 1], output_token_ids=[3, 3])
    assert found.removed == {}
    np.testing.assert_allclose(found.logprobs, torch.tensor([1, -2, 0.5, -0.4]).log_softmax(0), atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=9),
    st.integers(0, 9),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.4]),
)
def test_identities(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    found = explain_sampling(logits, params)
    kept = found.probabilities > 0
    assert found.probabilities.sum() == pytest.approx(1, abs=1e-5)
    mass = np.exp(found.raw_logprobs[kept]).sum()
    np.testing.assert_allclose(found.logprobs[kept], found.raw_logprobs[kept] - math.log(mass), atol=1e-5)
    removed = [token for tokens in found.removed.values() for token in tokens]
    assert len(removed) == len(set(removed)) == len(logits) - kept.sum()


def test_it_tells_what_the_engine_did(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model_folder)
    make_logits, rows = llm.engine.runner.logits, []

    def recorded(*given: Any) -> torch.Tensor:
        logits = make_logits(*given)
        rows.append(logits[0].clone())
        return logits

    monkeypatch.setattr(llm.engine.runner, "logits", recorded)
    params = SamplingParams(
        seed=4, max_tokens=12, top_k=6, top_p=0.9, min_p=0.05, temperature=0.8, repetition_penalty=1.3, min_tokens=12
    )
    prompt = [1, 10, 2, 11]
    sample = llm.generate([prompt], params)[0].samples[0]
    assert len(rows) == 12
    for index, token in enumerate(sample.token_ids):
        found = explain_sampling(
            rows[index],
            params,
            prompt_token_ids=prompt,
            output_token_ids=sample.token_ids[:index],
            eos_token_ids=llm.engine.eos_ids,
        )
        assert found.logprobs[token] == pytest.approx(sample.logprobs[index], abs=1e-5)
        assert found.raw_logprobs[token] == pytest.approx(sample.raw_logprobs[index], abs=1e-5)
        assert len(found.probabilities.nonzero()[0]) <= 6


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        ([], {}, "give those of one token"),
        ([[1.0, 2.0]], {}, r"shape \(1, 2\)"),
        ([1.0, 2.0], {"prompt_token_ids": [2]}, "token id 2 is outside the vocabulary"),
    ],
)
def test_bad_input(logits: list[float], options: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain_sampling(logits, SamplingParams(), **options)  # type: ignore[arg-type]
