"""Drafts change how many steps a sample takes, and nothing else that a caller sees.

Everything is float32 on compiled kernels, hence bitwise comparable, unless a test says otherwise. `Guesser` knows what
a plain engine said and guesses that, with mistakes: drafts are then right, wrong, and wrong in the middle.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import Olmo2Config, Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM

from inference import LLM, SamplingParams
from inference.llm import RequestOutput
from inference.model.architecture import read_architecture
from inference.replay import replay_schedule
from inference.request import Sequence
from inference.speculative.draft_model import DraftModel
from inference.speculative.suffix_drafts import SuffixDrafts
from olmorl.contract.errors import ConfigError, WeightUpdateError

PROMPTS = [[1, 10, 2, 11], [3, 10, 4, 10, 5, 11], [9] * 17, [0], [3, 10, 4, 10, 5, 11, 2, 2, 7]]
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 0.7},
    {"min_p": 0.05},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 2.5, "temperature": 0, "ignore_eos": True},
    {"frequency_penalty": 1.5, "min_tokens": 9, "logprobs": 2},
    {"stop": ("1", "a3", "=-b"), "min_tokens": 3},
    {"stop_token_ids": (3, 4, 5), "top_k": 5, "prompt_logprobs": True},
    {"top_p": 0.8, "temperature": 0.7, "min_p": 0.05, "stop": ("0",), "logprobs": 1, "logprobs_mode": "raw"},
]
REPEATING = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


class Guesser(SuffixDrafts):
    """Drafts what `known` has of a sample's text from where it is, each token wrong with probability `wrong`."""

    def __init__(self, known: dict[tuple[str, int], list[int]], *, wrong: float, max_draft: int = 7) -> None:
        super().__init__(max_draft=max_draft, step_tokens=256)
        self.known = known
        self.wrong = wrong
        self.dice = random.Random(0)

    def propose(self, running: list[Sequence]) -> None:
        for sequence in running:
            text = self.known.get((sequence.request.request_id, sequence.sample_index))
            room = sequence.max_tokens - sequence.num_tokens - 1
            if text is None or sequence.num_output == 0 or sequence.num_tokens - sequence.num_computed != 1:
                continue
            following = text[sequence.num_output :][: max(0, min(self.max_draft, room))]
            sequence.draft = [self.dice.randrange(22) if self.dice.random() < self.wrong else t for t in following]


def known_texts(outs: list[RequestOutput]) -> dict[tuple[str, int], list[int]]:
    return {(out.request_id, s.sample_index): s.token_ids for out in outs for s in out.samples}


def seen(outs: list[RequestOutput]) -> Any:
    return [
        [
            (s.token_ids, s.text, s.logprobs, s.raw_logprobs, s.top_logprobs, s.finish_reason, s.error, s.version_spans)
            for s in out.samples
        ]
        for out in outs
    ]


def both(folder: str, prompts: list[list[int]], params: list[SamplingParams], *, wrong: float, **options: Any) -> Any:
    """The outputs of a plain engine and of one with drafts, and the second engine."""
    plain, drafted = (LLM(folder, threads=1, **options) for _ in range(2))
    outs = plain.generate(prompts, params)
    drafted.engine.speculation = Guesser(known_texts(outs), wrong=wrong)
    return outs, drafted.generate(prompts, params), drafted


def ruled(rule: int, n: int, length: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max(length, RULES[rule].get("min_tokens", 1)), seed=rule, **RULES[rule])


requests = st.lists(
    st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(RULES) - 1), st.integers(1, 3), st.integers(1, 30)),
    min_size=1,
    max_size=4,
)
options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 8),
        "kv_cache_tokens": st.sampled_from([52, 80, 400]),
        "block_size": st.sampled_from([1, 4, 8]),
        "max_tokens_per_step": st.sampled_from([1, 3, 7, 64]),
        "prefix_caching": st.booleans(),
        "batching": st.sampled_from(["continuous", "continuous", "static"]),
    }
)


@settings(max_examples=25, deadline=None)
@given(asked=requests, room=options, wrong=st.sampled_from([0.0, 0.2, 0.6]))
def test_nothing_but_the_number_of_steps_differs(model_folder: str, asked: list[Any], room: Any, wrong: float) -> None:
    """Any rules, with preemption, chunked prefill and prefix caching."""
    params = [ruled(rule, n, length) for _, rule, n, length in asked]
    plain, drafted, llm = both(model_folder, [PROMPTS[p] for p, *_ in asked], params, wrong=wrong, **room)
    assert seen(drafted) == seen(plain)
    assert [out.prompt_logprobs for out in drafted] == [out.prompt_logprobs for out in plain]
    after = llm.stats()
    assert after["running"] == after["waiting"] == after["kv_usage"] == 0
    if wrong == 0:
        assert after["accepted_tokens"] == after["drafted_tokens"]


@pytest.fixture(scope="module")
def sliding_folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(3)
    config = Olmo3Config(
        vocab_size=22,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.2,
        eos_token_id=21,
        bos_token_id=None,
        pad_token_id=None,
    )
    folder: Path = tmp_path_factory.mktemp("sliding")
    Olmo3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model_folder) / name, folder)
    return str(folder)


@settings(max_examples=8, deadline=None)
@given(room=options, wrong=st.sampled_from([0.0, 0.3]))
def test_where_layers_see_a_window(sliding_folder: str, room: Any, wrong: float) -> None:
    """A block leaves the window's pool by what was accepted, not by what was drafted."""
    assert {layer.window for layer in read_architecture(Path(sliding_folder)).layers} == {None, 7}
    params = [SamplingParams(n=2, max_tokens=40, seed=1, ignore_eos=True)] * 3
    plain, drafted, _ = both(sliding_folder, PROMPTS[:3], params, wrong=wrong, **room)
    assert seen(drafted) == seen(plain)


@pytest.mark.parametrize("rules", RULES)
def test_on_the_definitions_in_torch(model_folder: str, rules: dict[str, Any]) -> None:
    """There a token's logits depend on the batch in their last digits, and so do logprobs."""
    params = [SamplingParams(n=2, max_tokens=30, seed=4, **rules)] * 3
    plain, drafted, llm = both(model_folder, PROMPTS[:3], params, wrong=0.2, kernels="torch")
    for a, b in zip(plain, drafted, strict=True):
        for one, other in zip(a.samples, b.samples, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert llm.stats()["accepted_tokens"] > 0


@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8"}, {"quantization": "int4", "quantize_head": True, "kv_cache_dtype": "int8"}],
    ids=["int8", "int4 and int8 KV"],
)
def test_quantised_engines_too(model_folder: str, options: dict[str, Any]) -> None:
    params = [SamplingParams(n=2, max_tokens=30, seed=4)] * 3
    plain, drafted, llm = both(model_folder, PROMPTS[:3], params, wrong=0.2, **options)
    assert seen(drafted) == seen(plain) and llm.stats()["accepted_tokens"] > 0


@pytest.mark.parametrize(("speculative", "temperature"), [("suffix", 0), ("model", 1)])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_are_given_up_have_the_beginning_of_what_they_would_have_said(
    model_folder: str, speculative: str, temperature: float, overlap: bool
) -> None:
    """In the middle of drafts, and whoever goes on notices nothing of it."""
    rules: dict[str, Any] = {"n": 2, "temperature": temperature, "max_tokens": 40, "ignore_eos": True}
    params = [SamplingParams(seed=seed, **rules) for seed in range(5)]
    whole = LLM(model_folder, threads=1).generate(PROMPTS, params)
    draft_model = model_folder if speculative == "model" else None
    llm = LLM(
        model_folder, threads=1, max_num_seqs=4, kv_cache_tokens=200, block_size=4, overlap=overlap,
        speculative=speculative, draft_model=draft_model,
    )  # fmt: skip
    names = [llm.add_request(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    done: dict[str, RequestOutput] = {}
    for step in range(500):
        if step in (3, 7):
            assert llm.abort(names[step // 3])
        done.update({out.request_id: out for out in llm.step()})
        if not llm.has_unfinished():
            break
    assert llm.stats()["accepted_tokens"] > 0 and llm.stats()["kv_usage"] == 0
    for number, (name, expected) in enumerate(zip(names, whole, strict=True)):
        given_up = number in (1, 2)
        for one, other in zip(done[name].samples, expected.samples, strict=True):
            length = len(one.token_ids)
            assert (one.token_ids, one.logprobs) == (other.token_ids[:length], other.logprobs[:length])
            assert length < 40 if given_up else length == 40


# Distributions


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    ],
)
def test_the_distribution_with_drafts_is_the_one_without(model_folder: str, rules: dict[str, Any]) -> None:
    """Chi-square over the second and third token of 800 samples each, the two engines under different seeds."""
    shape: dict[str, Any] = {
        "max_num_seqs": 800,
        "kv_cache_tokens": 1 << 16,
        "max_tokens_per_step": 1 << 14,
        "threads": 1,
    }
    plain, drafted = LLM(model_folder, **shape), LLM(model_folder, **shape)
    counts = np.zeros((2, 22, 22))
    for number, llm in enumerate((plain, drafted)):
        if llm is drafted:
            likely = [int(token) for token in counts[0].sum(1).argsort()[::-1][:2]]
            guess = {("0", i): [0, likely[i % 2], int(counts[0][likely[i % 2]].argmax()), 0] for i in range(800)}
            llm.engine.speculation = Guesser(guess, wrong=0, max_draft=3)
        params = SamplingParams(n=800, max_tokens=4, seed=number, ignore_eos=True, **rules)
        [out] = llm.generate([PROMPTS[0]], params)
        for sample in out.samples:
            counts[number][tuple(sample.token_ids[1:3])] += 1
    table = counts.reshape(2, -1)
    common = table.sum(0) >= 16
    table = np.column_stack([table[:, common], table[:, ~common].sum(1)])
    table = table[:, table.sum(0) > 0]
    accepted = drafted.stats()["accepted_tokens"] / drafted.stats()["drafted_tokens"]
    assert 0.02 < accepted < 0.9, "drafts are right sometimes"
    assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize(
    ("probs", "guess", "length", "tokens"),
    [
        ([0.7, 0.2, 0.1], 0, 1, 1.7),
        ([0.7, 0.2, 0.1], 0, 3, 2.533),
        ([0.7, 0.2, 0.1], 0, 5, 2.941),
        ([0.5, 0.3, 0.2], 1, 3, 1.417),
    ],
)
def test_acceptance_and_tokens_a_step_are_those_of_the_formula(
    model_folder: str, probs: list[float], guess: int, length: int, tokens: float
) -> None:
    """A guess is right with its probability a; k of them give (1 - a^(k+1)) / (1 - a) tokens a step."""
    llm = LLM(model_folder, threads=1, max_num_seqs=64, kv_cache_tokens=1 << 16)
    logits_V = torch.full((22,), -torch.inf)
    logits_V[:3] = torch.tensor(probs).log()
    llm.engine.runner.logits = lambda _, rows, more: logits_V.expand(len(rows) + len(more), -1)  # type: ignore[method-assign]
    llm.engine.speculation = Guesser({("0", i): [guess] * 999 for i in range(64)}, wrong=0, max_draft=length)
    llm.generate([PROMPTS[0]], SamplingParams(n=64, max_tokens=120, ignore_eos=True, seed=0))
    found = llm.stats()
    rate = probs[guess]
    assert tokens == pytest.approx((1 - rate ** (length + 1)) / (1 - rate), abs=1e-3)
    # The last draft of a sample is cut short by its end: that is one of at least 40 here.
    assert found["accepted_tokens"] / found["verifications"] + 1 == pytest.approx(tokens, rel=0.03)


# The engine around them


def test_texts_that_repeat_themselves_take_fewer_steps(model_folder: str) -> None:
    outs, steps = [], []
    for speculative in (None, "suffix"):
        llm = LLM(model_folder, threads=1, speculative=speculative)
        outs.append(llm.generate(PROMPTS[:2], REPEATING))
        steps.append(llm.stats()["steps"])
    assert seen(outs[0]) == seen(outs[1])
    assert steps[1] < 0.75 * steps[0]


def test_what_another_sample_of_the_prompt_said_is_guessed(model_folder: str) -> None:
    """Also by a request that is finished."""
    llm = LLM(model_folder, threads=1, speculative="suffix", prefix_caching=False)
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=5)
    steps = [0.0]
    for _ in range(2):
        llm.generate([PROMPTS[0]], params)
        steps.append(llm.stats()["steps"])
    first, second = np.diff(steps)
    assert first > 50 and second < 15
    before = llm.stats()["drafted_tokens"]
    llm.generate([PROMPTS[1]], SamplingParams(max_tokens=4, ignore_eos=True, seed=5))
    assert llm.stats()["drafted_tokens"] - before <= 2, "another prompt has other texts"


def test_in_a_full_batch_nothing_is_guessed(model_folder: str) -> None:
    def drafted(n: int) -> float:
        llm = LLM(model_folder, threads=1, speculative="suffix", speculative_step_tokens=6)
        largest = 0
        llm.add_request(PROMPTS[0], SamplingParams(n=n, temperature=0, max_tokens=40, ignore_eos=True))
        while llm.has_unfinished():
            before = llm.stats()["tokens_computed"]
            llm.step()
            if llm.stats()["output_tokens"] > n:
                largest = max(largest, llm.stats()["tokens_computed"] - before)
        assert largest <= max(6, n)
        return llm.stats()["drafted_tokens"]

    assert drafted(6) == 0 and drafted(5) > 0


def test_guesses_are_computed_and_counted_as_such(model_folder: str) -> None:
    """`tokens_computed`, FLOPs and bytes are of what went through the model; output tokens of what came out."""
    params = [SamplingParams(max_tokens=30, seed=2, ignore_eos=True)] * 2
    plain = LLM(model_folder, threads=1, prefix_caching=False)
    outs = plain.generate(PROMPTS[:2], params)
    drafted = LLM(model_folder, threads=1, prefix_caching=False)
    drafted.engine.speculation = Guesser(known_texts(outs), wrong=0.3)
    drafted.generate(PROMPTS[:2], params)
    a, b = plain.stats(), drafted.stats()
    refused = b["drafted_tokens"] - b["accepted_tokens"]
    assert refused > 0
    assert b["output_tokens"] == a["output_tokens"] and b["recomputed_tokens"] == 0
    assert b["tokens_computed"] == a["tokens_computed"] + refused
    costs = drafted.engine._costs
    per_token = 2 * (costs.body_parameters + costs.head_parameters)  # each guess is judged by logits behind it
    assert b["flops"] - a["flops"] == pytest.approx(per_token * refused, rel=0.2)  # and their attention
    assert b["bytes"] < a["bytes"] * b["steps"] / a["steps"] * 1.2, "weights are read once a step"
    assert b["slot_waste"] == a["slot_waste"] == 0


def test_an_update_between_two_steps(model_folder: str) -> None:
    """Each token is of the weights it was drawn by, as in a plain engine updated at the same token."""
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)

    def moved(llm: LLM) -> list[tuple[str, torch.Tensor]]:
        noise = torch.Generator().manual_seed(1)
        return [(n, t + 0.1 * torch.randn(t.shape, generator=noise)) for n, t in llm.engine.decoder.tensors.items()]

    for kv in ("keep", "recompute"):
        llm = LLM(model_folder, threads=1)
        guesses = LLM(model_folder, threads=1).generate([PROMPTS[0]], params)
        llm.engine.speculation = Guesser(known_texts(guesses), wrong=0.2)
        llm.add_request(PROMPTS[0], params)
        for _ in range(4):
            llm.step()
        (sequence,) = llm.engine.scheduler.running
        at = sequence.num_output
        assert at > 5
        llm.update_weights(moved(llm), version=1, kv=kv)
        drafted = [out for _ in range(80) if llm.has_unfinished() for out in llm.step()]
        plain = LLM(model_folder, threads=1)
        plain.add_request(PROMPTS[0], params)
        for _ in range(at):
            plain.step()
        plain.update_weights(moved(plain), version=1, kv=kv)
        expected = [out for _ in range(80) if plain.has_unfinished() for out in plain.step()]
        assert seen(drafted) == seen(expected)
        assert drafted[0].samples[0].kv_events == expected[0].samples[0].kv_events
        assert drafted[0].samples[0].version_spans == [(0, 0, at), (1, at, 40)]


def test_what_was_refused_is_never_found_in_the_prefix_cache(model_folder: str) -> None:
    """A later request that begins with what was said, and one that begins with what was guessed in vain."""
    params = SamplingParams(max_tokens=24, seed=1, ignore_eos=True)
    [out] = LLM(model_folder, threads=1).generate([PROMPTS[0]], params)
    said = out.samples[0].token_ids
    wrong = [(token + 1) % 20 for token in said]
    llm = LLM(model_folder, threads=1, block_size=4)
    llm.engine.speculation = Guesser({("0", 0): said[:9] + wrong[9:]}, wrong=0)
    [drafted] = llm.generate([PROMPTS[0]], params)
    assert drafted.samples[0].token_ids == said
    for following, cached in ((said, 24), (said[:9] + wrong[9:], 12)):
        before = llm.stats()["prefix_hits"]
        prompt = PROMPTS[0] + following
        [later] = llm.generate([prompt], params)
        assert llm.stats()["prefix_hits"] - before == cached
        [cold] = LLM(model_folder, threads=1).generate([prompt], params)
        assert later.samples[0].token_ids == cold.samples[0].token_ids


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_ahead_where_nothing_is_guessed(model_folder: str, overlap: bool) -> None:
    """With overlap, steps with drafts wait for the tokens of the last one; fuller ones do not."""
    params = SamplingParams(n=2, temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
    plain = LLM(model_folder, threads=1)
    drafted = LLM(model_folder, threads=1, overlap=overlap, speculative="suffix", speculative_step_tokens=5)
    ahead, found = [], []
    for llm in (plain, drafted):
        done: dict[str, RequestOutput] = {}
        for prompt in PROMPTS[:3]:
            llm.add_request(prompt, params, lengths=[30, 60])
        while llm.has_unfinished():
            done.update({out.request_id: out for out in llm.step()})
            if llm is drafted:
                ahead.append((len(llm.engine.scheduler.running), len(llm.engine._flights)))
        found.append(seen([done[str(i)] for i in range(3)]))
    assert found[0] == found[1]
    assert all(flights == int(overlap and running >= 5) for running, flights in ahead if running)
    assert {running >= 5 for running, _ in ahead} == {True, False} and drafted.stats()["accepted_tokens"] > 0


def test_a_batch_that_fills_up_in_a_step_with_guesses(model_folder: str) -> None:
    """The next step may have none and could be launched ahead, but not before it is known how many were right."""

    def outputs(**options: Any) -> Any:
        llm = LLM(model_folder, threads=1, max_num_seqs=4, overlap=True, **options)
        outs = []
        for number in range(12):
            llm.add_request(PROMPTS[number % 3], SamplingParams(max_tokens=24, seed=number, ignore_eos=True))
            for _ in range(4):
                outs += llm.step()
        while llm.has_unfinished():
            outs += llm.step()
        return seen(sorted(outs, key=lambda out: int(out.request_id))), llm.stats()["accepted_tokens"]

    plain, _ = outputs()
    drafted, accepted = outputs(speculative="model", draft_model=model_folder, speculative_step_tokens=4)
    assert drafted == plain and accepted > 10


def test_a_recorded_schedule_comes_out_the_same(model_folder: str, tmp_path: Path) -> None:
    llm = LLM(model_folder, threads=1, speculative="suffix", schedule_dir=str(tmp_path))
    for seed in (1, 1, 2):
        llm.generate(PROMPTS[:2], SamplingParams(n=2, max_tokens=20, seed=seed))
    report = replay_schedule(tmp_path / "llm.jsonl")
    assert report.divergence is None and report.steps == llm.stats()["steps"] and llm.stats()["accepted_tokens"] > 0


def test_a_model_on_two_ranks(model_folder: str) -> None:
    """The other rank computes what is guessed as it computes all else."""
    params = [SamplingParams(n=2, max_tokens=40, seed=1, ignore_eos=True, temperature=t) for t in (0, 1)]
    plain = LLM(model_folder, threads=1).generate(PROMPTS[:2], params)
    llm = LLM(model_folder, threads=1, tensor_parallel_size=2, speculative="suffix")
    for one, other in zip(llm.generate(PROMPTS[:2], params), plain, strict=True):
        assert [s.token_ids for s in one.samples] == [s.token_ids for s in other.samples]
    assert llm.stats()["accepted_tokens"] > 0


# A draft model


def other(llm: LLM, scale: float) -> list[tuple[str, torch.Tensor]]:
    noise = torch.Generator().manual_seed(5)
    return [(n, t + scale * torch.randn(t.shape, generator=noise)) for n, t in llm.engine.decoder.tensors.items()]


@settings(max_examples=20, deadline=None)
@given(asked=requests, room=options, scale=st.sampled_from([0.0, 0.03]))
def test_a_draft_model(model_folder: str, asked: list[Any], room: Any, scale: float) -> None:
    """One that is the model itself is always right: it draws with the same rules and noise, behind the same KV."""
    params = [ruled(rule, n, length) for _, rule, n, length in asked]
    prompts = [PROMPTS[p] for p, *_ in asked]
    plain = LLM(model_folder, threads=1, **room)
    drafted = LLM(model_folder, threads=1, speculative="model", draft_model=model_folder, **room)
    if scale:
        drafted.update_draft_weights(other(drafted, scale))
    outs = drafted.generate(prompts, params)
    assert seen(outs) == seen(plain.generate(prompts, params))
    if not scale and all(
        s.finish_reason == "length" for out in outs for s in out.samples
    ):  # no draft went beyond a stop
        assert drafted.stats()["accepted_tokens"] == drafted.stats()["drafted_tokens"]


def test_a_draft_model_where_layers_see_a_window(sliding_folder: str) -> None:
    params = SamplingParams(n=2, max_tokens=60, seed=1, ignore_eos=True)
    plain = LLM(sliding_folder, threads=1, block_size=4).generate(PROMPTS[:2], params)
    llm = LLM(sliding_folder, threads=1, block_size=4, speculative="model", draft_model=sliding_folder)
    assert seen(llm.generate(PROMPTS[:2], params)) == seen(plain)
    assert llm.stats()["accepted_tokens"] == llm.stats()["drafted_tokens"] > 100


def test_a_draft_model_catches_up_with_long_texts_piece_by_piece(model_folder: str) -> None:
    """The batch is full at first, so nobody drafts; then a long text is behind the model all at once."""
    options = {"threads": 1, "max_tokens_per_step": 7, "speculative_step_tokens": 3}
    llm = LLM(model_folder, speculative="model", draft_model=model_folder, **options)
    llm.add_request(PROMPTS[2], SamplingParams(n=3, max_tokens=60, seed=1, ignore_eos=True), lengths=[60, 30, 20])
    while llm.has_unfinished():
        llm.step()
    assert llm.stats()["accepted_tokens"] == llm.stats()["drafted_tokens"] > 10


def test_weights_of_a_draft_model_change_how_often_it_is_right(model_folder: str) -> None:
    llm = LLM(model_folder, threads=1, speculative="model", draft_model=model_folder)
    params = SamplingParams(max_tokens=80, seed=1, ignore_eos=True)

    def acceptance() -> tuple[float, list[int]]:
        before = llm.stats()
        [out] = llm.generate([PROMPTS[0]], params)
        after = llm.stats()
        drafted, accepted = (after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens"))
        return accepted / drafted, out.samples[0].token_ids

    right, tokens = acceptance()
    weights = [(name, tensor.clone()) for name, tensor in llm.engine.decoder.tensors.items()]
    llm.update_draft_weights(other(llm, 0.5))
    wrong, same = acceptance()
    assert right == 1 and wrong < 0.5 and same == tokens
    with pytest.raises(WeightUpdateError, match="tensors are missing"):
        llm.update_draft_weights(weights[1:])
    llm.update_draft_weights(weights)
    assert acceptance() == (1, tokens)
    with pytest.raises(ValueError, match="there is no draft model"):
        LLM(model_folder, speculative="suffix").update_draft_weights(weights)


@pytest.mark.parametrize(("p", "q"), [([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]), ([0.7, 0.2, 0.1], [0.7, 0.1, 0.2])])
def test_two_draws_with_one_noise_are_equal_as_often_as_the_formula_says(
    model_folder: str, p: list[float], q: list[float]
) -> None:
    llm = LLM(
        model_folder, threads=1, max_num_seqs=64, kv_cache_tokens=1 << 16, speculative="model",
        draft_model=model_folder, speculative_tokens=1, speculative_step_tokens=256,
    )  # fmt: skip
    assert isinstance(llm.engine.speculation, DraftModel)
    for runner, probs in ((llm.engine.runner, p), (llm.engine.speculation._runner, q)):
        logits_V = torch.full((22,), -torch.inf)
        logits_V[:3] = torch.tensor(probs).log()

        def logits(_: Any, rows: list[int], more: list[Any], logits_V: torch.Tensor = logits_V) -> torch.Tensor:
            return logits_V.expand(len(rows) + len(more), -1)

        runner.logits = logits  # type: ignore[method-assign]
    [out] = llm.generate([PROMPTS[0]], SamplingParams(n=64, max_tokens=120, ignore_eos=True, seed=0))
    found = llm.stats()
    both = sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(3)) for x in range(3))
    least = sum(map(min, p, q))
    assert both <= least
    count = found["drafted_tokens"]
    assert count > 2000
    assert abs(found["accepted_tokens"] / count - both) < 4 * (both * (1 - both) / count) ** 0.5
    tokens = np.bincount([token for sample in out.samples for token in sample.token_ids], minlength=3)
    assert stats.chisquare(tokens, tokens.sum() * np.array(p)).pvalue > 1e-3


def test_a_draft_model_costs_what_it_computes(model_folder: str) -> None:
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    plain = LLM(model_folder, threads=1)
    llm = LLM(model_folder, threads=1, speculative="model", draft_model=model_folder)
    for one in (plain, llm):
        one.generate([PROMPTS[0]], params)
    assert 1.8 < llm.stats()["flops"] / plain.stats()["flops"] < 2.2, "each token went through two models"


def test_a_draft_model_of_another_vocabulary(model_folder: str, tmp_path: Path) -> None:
    config = Olmo2Config(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    Olmo2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has 30 tokens, the model 22"):
        LLM(model_folder, speculative="model", draft_model=str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"speculative": "eagle"},
        {"speculative_tokens": 0},
        {"speculative_step_tokens": -1},
        {"speculative": "model"},
        {"draft_model": "somewhere", "speculative": "suffix"},
    ],
)
def test_refusals(model_folder: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is"):
        LLM(model_folder, **options)
