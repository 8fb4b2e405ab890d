import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import ConfigError
from olmorl.data.mixture import Share, shares_per_epoch
from olmorl.data.prompt import Check, EncodedExample, Prompt
from olmorl.data.prompt_set import PromptSet
from olmorl.data.stream import PromptStream, epoch_order


def make_set(*sizes: int, per_epoch: tuple[int, ...] | None = None) -> PromptSet:
    counts = per_epoch or sizes
    return PromptSet(
        tuple(
            EncodedExample(
                index=2 * i,
                token_ids=np.array([i], dtype=np.int32),
                text=str(i),
                checks=(Check(None, str(i)),),
                data_source="s",
            )
            for i in range(sum(sizes))
        ),
        tuple(Share(name="s", size=size, per_epoch=count) for size, count in zip(sizes, counts, strict=True)),
    )


def key(prompt: Prompt) -> tuple[int, int, int, str]:
    return prompt.epoch, prompt.position, prompt.index, prompt.prompt_id


@given(
    size=st.integers(1, 9),
    seed=st.integers(-5, 2**70),
    shuffle=st.booleans(),
    cut=st.integers(0, 25),
    more=st.integers(1, 25),
)
def test_resume_anywhere_gives_the_same_order(size: int, seed: int, shuffle: bool, cut: int, more: int) -> None:
    whole = PromptStream(make_set(size), seed=seed, shuffle=shuffle)
    served = [whole.next() for _ in range(cut + more)]

    first = PromptStream(make_set(size), seed=seed, shuffle=shuffle)
    for _ in range(cut):
        first.next()
    state = json.loads(json.dumps(first.state()))
    second = PromptStream(make_set(size), seed=seed, shuffle=shuffle)
    second.restore(state)
    assert [key(second.next()) for _ in range(more)] == [key(prompt) for prompt in served[cut:]]
    for prompt in served:
        assert key(second.prompt_at(prompt.epoch, prompt.position)) == key(prompt)


SOURCES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 14)), min_size=1, max_size=4)


@given(sources=SOURCES, seed=st.integers(0, 2**32), shuffle=st.booleans(), cut=st.integers(0, 60))
def test_resume_in_mid_epoch_of_a_mixture(sources: list[tuple[int, int]], seed: int, shuffle: bool, cut: int) -> None:
    sizes, counts = zip(*sources, strict=True)

    def stream() -> PromptStream:
        return PromptStream(make_set(*sizes, per_epoch=counts), seed=seed, shuffle=shuffle)

    whole = stream()
    served = [whole.next() for _ in range(cut + 40)]
    first = stream()
    for _ in range(cut):
        first.next()
    second = stream()
    second.restore(json.loads(json.dumps(first.state())))
    assert [key(second.next()) for _ in range(40)] == [key(prompt) for prompt in served[cut:]]
    for prompt in served:
        assert key(second.prompt_at(prompt.epoch, prompt.position)) == key(prompt)
    assert len({prompt.prompt_id for prompt in served}) == len(served)


@given(sources=SOURCES, seed=st.integers(0, 2**32), epochs=st.integers(1, 8))
def test_a_mixture_keeps_its_shares_and_all_rows_take_their_turn(
    sources: list[tuple[int, int]], seed: int, epochs: int
) -> None:
    sizes, counts = zip(*sources, strict=True)
    stream = PromptStream(make_set(*sizes, per_epoch=counts), seed=seed)
    starts = np.cumsum([0, *sizes])
    seen = np.zeros(sum(sizes), dtype=int)
    for _ in range(epochs):
        before = seen.copy()
        for _ in range(sum(counts)):
            seen[stream.next().index // 2] += 1
        epoch = [int((seen - before)[a:b].sum()) for a, b in itertools.pairwise(starts)]
        assert epoch == list(counts)
    for a, b in itertools.pairwise(starts):
        assert seen[a:b].max() - seen[a:b].min() <= 1


def test_shares() -> None:
    def sections(*weights: float) -> list[SourceSection]:
        return [SourceSection(path=str(i), weight=weight) for i, weight in enumerate(weights)]

    assert shares_per_epoch(sections(1, 1), [10, 90]) == [50, 50]
    assert shares_per_epoch(sections(1, 2), [50, 50]) == [33, 67]
    assert shares_per_epoch(sections(1e-9, 1), [50, 50]) == [1, 100]
    plain = [SourceSection(path="a"), SourceSection(path="b", count=3)]
    assert shares_per_epoch(plain, [10, 90]) == [10, 3]


def test_the_order_of_a_mixture_is_pinned() -> None:
    stream = PromptStream(make_set(3, 2, 4, per_epoch=(2, 3, 4)), seed=5)
    assert [stream.next().index // 2 for _ in range(18)] == [3, 3, 4, 0, 5, 1, 6, 7, 8, 7, 4, 5, 1, 6, 8, 2, 4, 3]


@given(size=st.integers(1, 50), seed=st.integers(0, 2**32), epoch=st.integers(0, 100))
def test_every_epoch_holds_every_prompt_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(size, seed, epoch, True)) == list(range(size))


def test_epochs_and_seeds_differ_and_the_order_is_pinned() -> None:
    assert epoch_order(8, 0, 0, True).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert epoch_order(8, 7, 3, True).tolist() == [2, 5, 7, 3, 0, 6, 4, 1]
    orders = {tuple(epoch_order(50, seed, epoch, True)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert epoch_order(4, 0, 3, False).tolist() == [0, 1, 2, 3]


def test_prompt_id_names_epoch_and_row() -> None:
    stream = PromptStream(make_set(2), seed=0, shuffle=False)
    assert [stream.next().prompt_id for _ in range(4)] == ["0_0", "0_2", "1_0", "1_2"]
    with pytest.raises(IndexError):
        stream.prompt_at(0, 2)


def test_a_cursor_of_other_data_is_refused() -> None:
    state = PromptStream(make_set(3), seed=0).state()
    for other, word in [
        (PromptStream(make_set(4), seed=0), "data"),
        (PromptStream(make_set(3, per_epoch=(2,)), seed=0), "mixture"),
        (PromptStream(make_set(3), seed=1), "run.seed"),
        (PromptStream(make_set(3), seed=0, shuffle=False), "data.shuffle"),
    ]:
        with pytest.raises(ConfigError, match=word):
            other.restore(state)
