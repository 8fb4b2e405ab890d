"""Sampling parameters are checked where they are made, and the message names field, value and range."""

import math
import pickle

import pytest

from olmorl.contract.errors import ConfigError, SyncError
from olmorl.contract.generation import SamplingParams


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("temperature", 10**400),
        ("temperature", 1e39),
        ("temperature", 1j),
        ("top_k", -2),
        ("top_k", 2**63),
        ("prompt_logprobs", 5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("presence_penalty", -math.inf),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 5),
        ("seed", 0.5),
        ("seed", 2**63),
        ("ignore_eos", "no"),
        ("prompt_logprobs", None),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field} is "):
        SamplingParams(**{field: value})


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(ValueError, match=r"min_tokens is 9; it must be in \[0, max_tokens=8\]"):
        SamplingParams(max_tokens=8, min_tokens=9)


def test_shorthands() -> None:
    params = SamplingParams(top_k=-1, stop="end", stop_token_ids=[3])
    assert (params.top_k, params.stop, params.stop_token_ids) == (0, ("end",), (3,))
    params = SamplingParams(stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == ((), ())


@pytest.mark.parametrize(
    "params, truncates",
    [
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(top_k=5), True),
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(min_p=0.1), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-0.5), True),
    ],
)
def test_truncates_says_what_a_learner_cannot_reproduce(params: SamplingParams, truncates: bool) -> None:
    assert params.truncates is truncates


def test_errors_cross_process_boundaries_whole() -> None:
    for error in (ConfigError("what, where, how"), SyncError("engine-0 waits")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and again.exit_code == error.exit_code
