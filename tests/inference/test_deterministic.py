"""`deterministic`: a request gives bitwise the same tokens and logprobs alone and in any company."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference import LLM, SamplingParams
from olmorl.contract.errors import ConfigError

KINDS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 5, "repetition_penalty": 1.3},
    {"n": 3},
]
Request = tuple[int, int]  # kind, prompt


def prompt_of(index: int) -> list[int]:
    return [(index * 7 + i * (index + 3)) % 20 for i in range(1 + 9 * index)]


def results(llm: LLM, requests: list[Request]) -> list[Any]:
    params = [SamplingParams(max_tokens=12, ignore_eos=True, seed=kind, **KINDS[kind]) for kind, _ in requests]
    outs = llm.generate([prompt_of(index) for _, index in requests], params)
    return [[(s.token_ids, s.logprobs, s.raw_logprobs) for s in out.samples] for out in outs]


@pytest.fixture(scope="module")
def alone(model_folder: str) -> dict[Request, Any]:
    llm = LLM(model_folder, deterministic=True)
    requests = [(kind, index) for kind in range(len(KINDS)) for index in range(5)]
    return {request: results(llm, [request])[0] for request in requests}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 4)), min_size=1, max_size=24),
    st.sampled_from([3, 16, 2048]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([128, 4096]),
    st.booleans(),
)
def test_bitwise_the_same_in_any_batch(
    model_folder: str,
    alone: dict[Request, Any],
    requests: list[Request],
    budget: int,
    block_size: int,
    pool: int,
    prefix_caching: bool,
) -> None:
    llm = LLM(
        model_folder,
        deterministic=True,
        max_tokens_per_step=budget,
        block_size=block_size,
        kv_cache_tokens=pool,
        prefix_caching=prefix_caching,
    )
    assert results(llm, requests) == [alone[request] for request in requests]


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"kernels": "torch"}])
def test_it_is_refused_where_it_would_not_hold(model_folder: str, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="deterministic"):
        LLM(model_folder, deterministic=True, **options)
