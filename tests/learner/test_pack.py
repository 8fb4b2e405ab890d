"""Packing loses nothing, balances ranks, keeps every field beside its token, and needs no torch."""

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.pack import UNITS_PER_RANK, concatenate, pack, unpack
from olmorl.contract.training import MicroBatch, TrainSample

shapes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=30)  # which prompt, response tokens


def make(prompt: int, response: int, index: int) -> TrainSample:
    """Every entry tells its sample and its position, so that any misalignment shows."""
    mark = np.arange(response) + 1000 * index
    return TrainSample(
        prompt_token_ids=np.arange(prompt + 1, dtype=np.int32) - 500,
        token_ids=mark.astype(np.int32),
        logprobs=-mark.astype(np.float32),
        token_versions=mark.astype(np.int32),
        loss_mask=mark % 3 != 0,
        advantage=float(index),
    )


def make_all(shape: list) -> list[TrainSample]:
    return [make(prompt, response, i) for i, (prompt, response) in enumerate(shape)]


def ranges(micro: MicroBatch) -> list[tuple[range, range]]:
    """Of each sample: its parent's tokens, its own."""
    bounds = micro.document_starts.tolist()
    own = [range(start, end) for start, end in pairwise(bounds)]
    with_children = set(micro.parents.tolist())
    return [
        (own[p] if p >= 0 else range(0), own[d]) for d, p in enumerate(micro.parents.tolist()) if d not in with_children
    ]


def documents(micro: MicroBatch) -> list[tuple]:
    return [tuple(micro.token_ids[[*before, *own]].tolist()) for before, own in ranges(micro)]


def whole(sample: TrainSample) -> tuple:
    return (*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist())


@settings(deadline=None, max_examples=150)
@given(shapes, st.integers(1, 5), st.integers(1, 90), st.integers(1, 4), st.sampled_from([math.inf, 20.0]))
def test_nothing_is_lost_and_ranks_are_balanced(
    shape: list, num_ranks: int, limit: int, num_mini_batches: int, attention_tokens: float
) -> None:
    samples = make_all(shape)
    batches = pack(
        samples,
        version=7,
        num_ranks=num_ranks,
        tokens_per_micro_batch=limit,
        num_mini_batches=num_mini_batches,
        attention_tokens=attention_tokens,
    )
    assert len(batches) == num_ranks and all(batch.version == 7 for batch in batches)
    packed = Counter(d for batch in batches for micro in batch.micro_batches for d in documents(micro))
    assert packed == Counter(map(whole, samples))
    of_ranks = [
        np.concatenate([np.zeros(0), *(m.behaviour_logprobs[m.loss_mask] for m in batch.micro_batches)])
        for batch in batches
    ]
    for sample, values in zip(samples, unpack(batches, of_ranks, [len(s.token_ids) for s in samples]), strict=True):
        np.testing.assert_array_equal(values, np.where(sample.loss_mask, sample.logprobs, np.nan))
    seen = 0
    for mini_batches in zip(*(batch.mini_batches for batch in batches), strict=True):
        assert len({len(mini.micro_batches) for mini in mini_batches}) == 1
        micros = [micro for mini in mini_batches for micro in mini.micro_batches]
        assert all(len(micro.token_ids) <= limit or len(ranges(micro)) == 1 for micro in micros)
        share = samples[seen : seen + sum(len(documents(micro)) for micro in micros)]
        assert Counter(d for micro in micros for d in documents(micro)) == Counter(map(whole, share)), "in order"
        assert {mini.num_loss_tokens for mini in mini_batches} == {sum(int(s.loss_mask.sum()) for s in share)}
        seen += len(share)
    sizes = [
        sum(len(documents(m)) for b in batches for m in b.mini_batches[i].micro_batches)
        for i in range(len(batches[0].mini_batches))
    ]
    assert len(sizes) == max(1, min(num_mini_batches, len(samples))) and max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=150)
@given(shapes, st.integers(2, 5), st.sampled_from([math.inf, 20.0]))
def test_ranks_have_like_work(shape: list, num_ranks: int, attention_tokens: float) -> None:
    samples = make_all(shape)
    batches = pack(
        samples, version=0, num_ranks=num_ranks, tokens_per_micro_batch=50, attention_tokens=attention_tokens
    )

    def cost(before: int, own: int) -> float:
        return own + ((before + own) ** 2 - before**2) / attention_tokens

    loads = [
        sum(
            cost(micro.position_ids[start], end - start)
            for micro in batch.micro_batches
            for start, end in pairwise(micro.document_starts.tolist())
            if end > start
        )
        for batch in batches
    ]
    heaviest = max((cost(0, len(whole(s))) for s in samples), default=0)
    total = sum(cost(0, len(whole(s))) for s in samples)
    prompts = sum(cost(0, n) for n in range(1, 7))  # which meet by chance in a micro-batch, and then cost less
    assert max(loads) - min(loads) <= max(heaviest, total / num_ranks / UNITS_PER_RANK) + prompts


@settings(deadline=None, max_examples=80)
@given(shapes)
def test_fields_stay_beside_their_tokens(shape: list) -> None:
    samples = make_all(shape)
    micro = concatenate(samples)
    assert micro.document_starts[0] == 0 and micro.document_starts[-1] == len(micro.token_ids)
    found = {documents(micro)[i]: pair for i, pair in enumerate(ranges(micro))}
    for sample in samples:
        before, own = found[whole(sample)]
        places = np.array([*before, *own], np.int64)
        np.testing.assert_array_equal(micro.position_ids[places], np.arange(len(places)))
        prompt, response = np.split(places, [len(sample.prompt_token_ids)])
        assert not micro.loss_mask[prompt].any() and not micro.advantages[prompt].any()
        assert (micro.token_versions[prompt] == -1).all()
        np.testing.assert_array_equal(micro.token_ids[response], sample.token_ids)
        np.testing.assert_array_equal(micro.behaviour_logprobs[response], sample.logprobs)
        np.testing.assert_array_equal(micro.token_versions[response], sample.token_versions)
        np.testing.assert_array_equal(micro.loss_mask[response], sample.loss_mask)
        assert (micro.advantages[response] == np.float32(sample.advantage)).all()


def test_a_prompt_is_laid_once_for_all_its_samples() -> None:
    micro = concatenate([make(9, 3, 0), make(4, 5, 1), make(9, 2, 2), make(9, 4, 3)])
    assert micro.document_starts.tolist() == [0, 10, 13, 15, 19, 29]
    assert micro.parents.tolist() == [-1, 0, 0, 0, -1]
    assert micro.position_ids[10:19].tolist() == [10, 11, 12, 10, 11, 10, 11, 12, 13]


def test_a_rank_with_nothing_gets_empty_micro_batches() -> None:
    batches = pack([make(1, 3, 0), make(1, 3, 1)], version=0, num_ranks=3, tokens_per_micro_batch=100)
    assert [len(batch.micro_batches[0].token_ids) for batch in batches] == [5, 5, 0]
    assert batches[2].micro_batches[0].document_starts.tolist() == [0]


def test_bad_samples_are_refused_by_name() -> None:
    good = make(2, 3, 0)
    with pytest.raises(ValueError, match="sample 1 has an empty prompt"):
        pack(
            [good, replace(good, prompt_token_ids=good.prompt_token_ids[:0])],
            version=0,
            num_ranks=1,
            tokens_per_micro_batch=10,
        )
    crooked = TrainSample(
        prompt_token_ids=good.prompt_token_ids,
        token_ids=good.token_ids,
        logprobs=good.logprobs[:-1],
        token_versions=good.token_versions,
        loss_mask=good.loss_mask,
        advantage=1.0,
    )
    with pytest.raises(ValueError, match="sample 0: logprobs has 2 entries for 3 tokens"):
        pack([crooked], version=0, num_ranks=1, tokens_per_micro_batch=10)
    with pytest.raises(ValueError, match="num_ranks = 0"):
        pack([good], version=0, num_ranks=0, tokens_per_micro_batch=10)


def test_the_driver_can_pack_without_torch() -> None:
    program = "import sys, learner.pack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
