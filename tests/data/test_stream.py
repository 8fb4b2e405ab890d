import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.contract.errors import ConfigError
from olmorl.data.mixture import Share
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
        (PromptStream(make_set(3), seed=1), "run.seed"),
        (PromptStream(make_set(3), seed=0, shuffle=False), "data.shuffle"),
    ]:
        with pytest.raises(ConfigError, match=word):
            other.restore(state)
