"""The engine against transformers on a real model, where one is at hand.

Set OLMORL_TEST_MODEL to a Hugging Face folder of a small model (a 135M Llama takes a few minutes on one core). Real
weights have what random ones lack: attention sinks, whose residual stream of 20,000 beside 150 costs float32 its last
digits. There two correct implementations differ by more than 1e-4 in single logprobs; see docs/numerics.md.
"""

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from inference import LLM, SamplingParams

FOLDER = os.environ.get("OLMORL_TEST_MODEL", "")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FOLDER, reason="OLMORL_TEST_MODEL names no folder of a real model"),
]
TEXTS = (
    "The",
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many",
    "import torch\n\ndef softmax(x):\n    return",
    "Once upon a time there was a small engine that",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
    "Question: what is the capital of France? Answer: Paris. Question: what is the capital of Italy? Answer:",
)
NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
NEAR_TIE = 1e-4
"""where the two best logits are nearer than this, another order of summation may choose the other"""

Check = Callable[[list[list[int]], list[list[float]]], None]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return [tokenizer(text).input_ids for text in TEXTS]


@pytest.fixture(scope="module")
def check(model: PreTrainedModel, prompts: list[list[int]]) -> Check:
    """Token for token, and each logprob, against transformers' cache continued greedily."""
    expected: list[list[int]] = []
    logprobs: list[list[float]] = []
    for prompt in prompts:
        logits = greedy_logits(model, prompt)
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > NEAR_TIE, "choose other prompts: this one is a near tie"
        expected.append(logits.argmax(-1).tolist())
        logprobs.append(logits.log_softmax(-1).max(-1).values.tolist())

    def compare(tokens: list[list[int]], found: list[list[float]]) -> None:
        assert tokens == expected
        difference = np.abs(np.array(found) - np.array(logprobs))
        assert difference.max() < 1e-4 and difference.mean() < 1e-5

    return compare


@torch.no_grad()
def greedy_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """[NEW, V]; transformers continuing its own cache, end of text or not."""
    cache, ids, rows = DynamicCache(config=model.config), prompt, []
    for _ in range(NEW):
        rows.append(model(torch.tensor([ids]), past_key_values=cache).logits[0, -1])
        ids = [int(rows[-1].argmax())]
    return torch.stack(rows)


def outputs(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    samples = [out.samples[0] for out in llm.generate(prompts, GREEDY)]
    return [sample.token_ids for sample in samples], [sample.raw_logprobs for sample in samples]


@pytest.mark.parametrize("chunk", [1, 3, 16, 2048])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunks_blocks_and_prefix_cache(
    prompts: list[list[int]], check: Check, chunk: int, block: int, prefix_caching: bool
) -> None:
    llm = LLM(
        FOLDER,
        max_tokens_per_step=chunk,
        block_size=block,
        prefix_caching=prefix_caching,
        kv_cache_tokens=1024,
        max_model_len=256,
    )
    for _ in range(2 if prefix_caching else 1):
        check(*outputs(llm, prompts))
    assert (llm.stats()["prefix_hits"] > 0) == prefix_caching


def test_forced_preemption(prompts: list[list[int]], check: Check) -> None:
    llm = LLM(FOLDER, kv_cache_tokens=80, block_size=4, max_model_len=256)
    check(*outputs(llm, prompts))
    assert llm.stats()["preemptions"] > 0


def test_join_and_leave(prompts: list[list[int]], check: Check) -> None:
    llm = LLM(FOLDER, max_num_seqs=4, max_tokens_per_step=9, kv_cache_tokens=1024, max_model_len=256)
    rids, done = [], {}
    others = []
    for prompt in prompts:
        others.append(llm.add_request(prompt[::-1], SamplingParams(max_tokens=3)))
        rids.append(llm.add_request(prompt, GREEDY))
        done.update({out.request_id: out.samples[0] for out in llm.step()})
    llm.abort(others[-1])
    while llm.has_unfinished():
        done.update({out.request_id: out.samples[0] for out in llm.step()})
    check([done[rid].token_ids for rid in rids], [done[rid].raw_logprobs for rid in rids])


def test_groups_batches_and_static_batching_draw_the_same(prompts: list[list[int]]) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=NEW, ignore_eos=True)
    results = []
    for options in ({"batching": "static", "max_num_seqs": 4}, {"max_num_seqs": 16}, {"kv_cache_tokens": 120}):
        llm = LLM(FOLDER, **{"kv_cache_tokens": 1024, "max_model_len": 256} | options)
        results.append([[s.token_ids for s in out.samples] for out in llm.generate(prompts, params)])
    assert results[0] == results[1] == results[2]


def test_mean_and_max_of_logprob_differences_are_those_of_float32(
    model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    """Against float64, on text cut at odd places: the engine may be no further away than transformers is."""
    text = np.array([token for prompt in prompts for token in prompt])
    sequences = [text[start : start + 16] for start in range(0, len(text) - 16, 3)]
    ids = torch.from_numpy(np.stack(sequences))
    exact = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64).eval()
    with torch.no_grad():
        reference, theirs = (
            one(ids).logits[:, :-1].double().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].numpy()
            for one in (exact, model)
        )
    ours = np.stack(LLM(FOLDER, kv_cache_tokens=1024, max_model_len=256).score(sequences))
    for difference in (np.abs(ours - reference), np.abs(theirs - reference)):
        assert difference.mean() < 1e-5
    assert np.abs(ours - reference).mean() < 1.5 * np.abs(theirs - reference).mean()
    assert np.abs(ours - reference).max() < 10 * np.abs(theirs - reference).max()
