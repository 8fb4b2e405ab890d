"""Packing loses nothing, balances ranks, keeps every field beside its token, and needs no torch."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.pack import concatenate, pack
from olmorl.contract.training import MicroBatch, TrainSample

lengths = st.tuples(st.integers(1, 8), st.integers(0, 40))


def make(prompt: int, response: int, index: int) -> TrainSample:
    """Every entry tells its sample and its position, so that any misalignment shows."""
    mark = np.arange(response) + 1000 * index
    return TrainSample(
        prompt_token_ids=np.arange(prompt, dtype=np.int32) + 1000 * index + 500,
        token_ids=mark.astype(np.int32),
        logprobs=-mark.astype(np.float32),
        token_versions=mark.astype(np.int32),
        loss_mask=mark % 3 != 0,
        advantage=float(index),
    )


def documents(micro: MicroBatch) -> list[tuple]:
    bounds = zip(micro.document_starts[:-1], micro.document_starts[1:], strict=True)
    return [tuple(micro.token_ids[start:end].tolist()) for start, end in bounds]


@settings(deadline=None, max_examples=150)
@given(st.lists(lengths, max_size=30), st.integers(1, 5), st.integers(1, 90))
def test_nothing_is_lost_and_ranks_are_balanced(shape: list, num_ranks: int, limit: int) -> None:
    samples = [make(prompt, response, i) for i, (prompt, response) in enumerate(shape)]
    batches = pack(samples, version=7, num_ranks=num_ranks, tokens_per_micro_batch=limit)

    assert len(batches) == num_ranks
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    packed = Counter(d for batch in batches for micro in batch.micro_batches for d in documents(micro))
    assert packed == Counter((*s.prompt_token_ids.tolist(), *s.token_ids.tolist()) for s in samples)
    expected = sum(int(s.loss_mask.sum()) for s in samples)
    assert all(batch.version == 7 and batch.num_loss_tokens == expected for batch in batches)
    loads = [sum(len(micro.token_ids) for micro in batch.micro_batches) for batch in batches]
    assert max(loads) - min(loads) <= max((p + r for p, r in shape), default=0)
    for micro in (micro for batch in batches for micro in batch.micro_batches):
        assert len(micro.token_ids) <= limit or len(micro.document_starts) == 2


@settings(deadline=None, max_examples=80)
@given(st.lists(lengths, max_size=12))
def test_fields_stay_beside_their_tokens(shape: list) -> None:
    samples = [make(prompt, response, i) for i, (prompt, response) in enumerate(shape)]
    micro = concatenate(samples)
    assert micro.document_starts[0] == 0 and micro.document_starts[-1] == len(micro.token_ids)
    for sample, start, end in zip(samples, micro.document_starts[:-1], micro.document_starts[1:], strict=True):
        split = start + len(sample.prompt_token_ids)
        np.testing.assert_array_equal(micro.position_ids[start:end], np.arange(end - start))
        np.testing.assert_array_equal(micro.token_ids[start:split], sample.prompt_token_ids)
        assert not micro.loss_mask[start:split].any() and not micro.advantages[start:split].any()
        assert (micro.token_versions[start:split] == -1).all()
        np.testing.assert_array_equal(micro.token_ids[split:end], sample.token_ids)
        np.testing.assert_array_equal(micro.behaviour_logprobs[split:end], sample.logprobs)
        np.testing.assert_array_equal(micro.token_versions[split:end], sample.token_versions)
        np.testing.assert_array_equal(micro.loss_mask[split:end], sample.loss_mask)
        assert (micro.advantages[split:end] == np.float32(sample.advantage)).all()


def test_a_rank_with_nothing_gets_empty_micro_batches() -> None:
    batches = pack([make(2, 3, 0), make(2, 3, 1)], version=0, num_ranks=3, tokens_per_micro_batch=100)
    assert [len(batch.micro_batches[0].token_ids) for batch in batches] == [5, 5, 0]
    assert batches[2].micro_batches[0].document_starts.tolist() == [0]


def test_bad_samples_are_refused_by_name() -> None:
    good = make(2, 3, 0)
    with pytest.raises(ValueError, match="sample 1 has an empty prompt"):
        pack([good, make(0, 3, 1)], version=0, num_ranks=1, tokens_per_micro_batch=10)
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
