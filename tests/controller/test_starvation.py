"""How long to try for a batch, how fast, and what is said of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.controller.group import Group, ScoredSample
from olmorl.controller.starvation import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Starvation
from olmorl.data.prompt import Prompt


def prompt_of(source: str) -> Prompt:
    return Prompt(
        index=0, token_ids=np.array([1], np.int32), text="", checks=(), data_source=source, epoch=0, position=0
    )


def group(*rewards: float | None, source: str = "sums", verdict: str = "timeout") -> Group:
    samples = [
        ScoredSample(sample=None, reward=reward, verdict="scored" if reward is not None else verdict)
        for reward in rewards
    ]
    made = Group(prompt=prompt_of(source), order=0, admitted_version=0, seed=0, t_admitted=0.0, samples=samples)
    made.has_signal = len({r for r in rewards if r is not None}) > 1
    return made


def test_it_ends_after_its_patience_and_begins_anew_with_every_batch() -> None:
    starvation = Starvation(groups_per_batch=2, patience=3)
    for _ in range(5):
        starvation.offered(group(1.0, 1.0))
    assert not starvation.exhausted
    starvation.filled()
    for _ in range(5):
        starvation.offered(group(0.0, 0.0))
    assert not starvation.exhausted
    starvation.offered(group(0.0, 0.0))
    assert starvation.exhausted


def test_it_says_what_came_and_from_where() -> None:
    starvation = Starvation(groups_per_batch=2, patience=3)
    assert starvation.describe() == "no group came"
    for made in (
        group(1.0, 1.0),
        group(1.0, 1.0),
        group(0.0, 0.0, source="olympiad"),
        group(1.0, 0.0),
        group(0.5, 0.5, source="essays"),
        group(None, None, 1.0, source="essays"),
    ):
        starvation.offered(made)
    assert starvation.describe() == (
        "of the last 6 groups: 2 all right, 1 all wrong, 1 with signal, 1 all alike, 1 mostly without a score (timeout)"
        " (without signal: sums 2, essays 2, olympiad 1)"
    )


def test_it_says_what_a_verifier_said() -> None:
    starvation = Starvation(groups_per_batch=2, patience=3)
    failed = group(None, 1.0)
    failed.samples[0].detail = "ValueError: no"
    starvation.offered(failed)
    assert starvation.describe().endswith("; the last sample without a score: ValueError: no")
    starvation.filled()
    starvation.offered(group(1.0, 1.0))
    assert "ValueError" not in starvation.describe()


@given(groups=st.integers(1, 5), patience=st.integers(1, 200), counts=st.lists(st.integers(0, 12), max_size=60))
def test_pauses_come_late_grow_and_are_handed_out_once(groups: int, patience: int, counts: list[int]) -> None:
    starvation = Starvation(groups_per_batch=groups, patience=patience)
    offered, last = 0, 0.0
    for count in counts:
        for _ in range(count):
            starvation.offered(group(1.0, 1.0))
        offered += count
        pause = starvation.next_pause()
        assert starvation.next_pause() == 0.0, "the same pause twice"
        assert starvation.exhausted == (offered >= patience * groups)
        if offered * 2 < patience * groups:
            assert pause == 0.0, "the first half of the patience runs at full speed"
        if pause:
            assert pause >= last and FIRST_PAUSE_SECONDS <= pause <= LONGEST_PAUSE_SECONDS
            last = pause
    starvation.filled()
    assert starvation.next_pause() == 0.0 and not starvation.exhausted


@pytest.mark.parametrize("patience", [1, 2, 64])
def test_there_is_at_least_one_pause_before_the_end(patience: int) -> None:
    starvation = Starvation(groups_per_batch=1, patience=patience)
    pauses = []
    while not starvation.exhausted:
        starvation.offered(group(0.0, 0.0))
        pauses.append(starvation.next_pause())
    assert any(pauses)
