"""The staleness bound, the slots, and that no group is ever in two places."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.group import Group, State


@dataclass(frozen=True)
class FakePrompt:
    epoch: int
    position: int

    @property
    def prompt_id(self) -> str:
        return f"{self.epoch}_{self.position}"

    @property
    def token_ids(self) -> np.ndarray:
        return np.array([1], np.int32)


def fill(buffer: RolloutBuffer, *, version: int, start: int = 0) -> list[Group]:
    groups = []
    while buffer.has_free_slot():
        prompt = FakePrompt(0, start + len(groups))
        groups.append(buffer.admit(prompt, version=version, seed=0, now=0.0))
    return groups


def finish(buffer: RolloutBuffer, groups: list[Group]) -> None:
    while buffer.claim():
        pass
    for group in groups:
        buffer.finish(group)


def test_slots_are_async_steps_plus_one_batches() -> None:
    buffer = RolloutBuffer(groups_per_batch=3, async_steps=2, window=4)
    assert len(fill(buffer, version=0)) == 9
    with pytest.raises(AssertionError, match="without a free slot"):
        buffer.admit(FakePrompt(0, 9), version=0, seed=0, now=0.0)


def test_batch_is_the_oldest_finished_groups() -> None:
    buffer = RolloutBuffer(groups_per_batch=2, async_steps=1, window=2)
    groups = fill(buffer, version=0)
    finish(buffer, [groups[3], groups[1], groups[2]])
    assert buffer.take_batch(0) == [groups[1], groups[2]]


def test_a_trained_group_holds_its_slot_until_its_weights_are_live() -> None:
    buffer = RolloutBuffer(groups_per_batch=2, async_steps=0, window=0)
    finish(buffer, fill(buffer, version=0))
    batch = buffer.take_batch(0)
    assert batch is not None
    buffer.trained(batch, made_version=1)
    assert not buffer.has_free_slot()
    buffer.release(0)
    assert not buffer.has_free_slot()
    buffer.release(1)
    assert len(buffer) == 0


def test_a_dropped_group_frees_its_slot_at_once() -> None:
    buffer = RolloutBuffer(groups_per_batch=2, async_steps=0, window=0)
    groups = fill(buffer, version=0)
    finish(buffer, groups[:1])
    buffer.drop(groups[0])
    assert buffer.has_free_slot()
    assert groups[0] not in buffer.outstanding()


def test_batch_waits_for_a_straggler_that_would_grow_too_old() -> None:
    buffer = RolloutBuffer(groups_per_batch=1, async_steps=1, window=1)
    slow, fast = fill(buffer, version=0)
    finish(buffer, [fast])
    # training `fast` at 0 leaves `slow` for version 1, lag 1 = window: allowed
    batch = buffer.take_batch(0)
    assert batch == [fast]
    buffer.trained(batch, made_version=1)
    buffer.release(1)
    (newer,) = fill(buffer, version=1, start=2)
    finish(buffer, [newer])
    assert buffer.straggler(1, [newer]) is slow
    assert buffer.take_batch(1) is None
    buffer.finish(slow)
    assert buffer.take_batch(1) == [slow]


def test_a_batch_overtakes_no_more_than_it_may() -> None:
    buffer = RolloutBuffer(groups_per_batch=2, async_steps=1, window=2, max_overtaken=1)
    groups = fill(buffer, version=0)
    finish(buffer, [groups[2], groups[3]])
    assert buffer.take_batch(0) is None, "two older ones are still under way"
    buffer.finish(groups[1])
    assert buffer.take_batch(0) == [groups[1], groups[2]]
    assert [group.overtaken for group in groups] == [True, False, False, False]


def test_order_of_admission() -> None:
    buffer = RolloutBuffer(groups_per_batch=2, async_steps=1, window=2, max_overtaken=0)
    groups = fill(buffer, version=0)
    finish(buffer, groups[1:])
    assert buffer.take_batch(0) is None
    buffer.finish(groups[0])
    assert buffer.take_batch(0) == groups[:2]
    assert not any(group.overtaken for group in groups)


def test_a_partial_batch_is_what_there_is() -> None:
    buffer = RolloutBuffer(groups_per_batch=3, async_steps=1, window=2)
    groups = fill(buffer, version=0)
    finish(buffer, [])
    assert buffer.take_batch(0, partial=True) is None
    buffer.finish(groups[4])
    assert buffer.take_batch(0) is None
    assert buffer.take_batch(0, partial=True) == [groups[4]]


def test_a_partial_batch_holds_the_slots_of_a_whole_one() -> None:
    """Else a synchronous run would admit groups while it trains, and find them too old."""
    buffer = RolloutBuffer(groups_per_batch=3, async_steps=0, window=0)
    groups = fill(buffer, version=0)
    finish(buffer, groups)
    for group in groups[1:]:
        buffer.drop(group)
    batch = buffer.take_batch(0, partial=True)
    assert batch == [groups[0]] and not buffer.has_free_slot()
    buffer.trained(batch, made_version=1)
    assert not buffer.has_free_slot()
    buffer.release(1)
    assert len(fill(buffer, version=1)) == 3


def test_of_a_taken_round_some_may_be_dropped() -> None:
    buffer = RolloutBuffer(groups_per_batch=2, async_steps=0, window=0)
    finish(buffer, fill(buffer, version=0))
    kept, dropped = buffer.take_batch(0) or []
    buffer.drop(dropped)
    buffer.trained([kept], made_version=1)
    assert buffer.groups == [kept] and buffer.has_free_slot()


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int | None]:
    groups = draw(st.integers(1, 4))
    async_steps = draw(st.integers(0, 4))
    window = draw(st.integers(async_steps, 2 * async_steps + 1))
    return groups, async_steps, window, draw(st.sampled_from([None, 0, 1, 3]))


@settings(max_examples=300, deadline=None)
@given(shape=shapes(), data=st.data())
def test_no_schedule_breaks_the_bound_or_blocks(shape: tuple[int, int, int, int | None], data: st.DataObject) -> None:
    """Groups finish in any order, some are dropped, updates go live late, a starved run trains less than a batch: every
    batch stays within the window and overtakes no more than it may, no prompt is trained twice, and training never
    comes to a halt."""
    groups_per_batch, async_steps, window, max_overtaken = shape
    buffer = RolloutBuffer(
        groups_per_batch=groups_per_batch, async_steps=async_steps, window=window, max_overtaken=max_overtaken
    )
    version = live = served = 0
    trained: set[str] = set()
    dropped: set[str] = set()
    running: list[Group] = []
    steps = 12
    while version < steps:
        moves = []
        if buffer.has_free_slot():
            moves.append("admit")
        if running:
            moves += ["finish", "finish", "drop"]
        if live < version:
            moves.append("go_live")
        batch = buffer.take_batch(version)
        assert batch is None or len(batch) == groups_per_batch
        if batch is None and not running and data.draw(st.booleans()):
            batch = buffer.take_batch(version, partial=True)
        if batch is not None:
            older = [group for group in running if group.order < batch[-1].order]
            assert max_overtaken is None or len(older) <= max_overtaken
            for group in batch:
                assert 0 <= version - group.admitted_version <= window
                assert group.prompt.prompt_id not in trained | dropped
                trained.add(group.prompt.prompt_id)
            version += 1
            buffer.trained(batch, made_version=version)
            continue
        assert moves, "nothing can move: the run hangs"
        move = data.draw(st.sampled_from(moves))
        if move == "admit":
            buffer.admit(FakePrompt(0, served), version=live, seed=0, now=0.0)
            served += 1
            group = buffer.claim()
            assert group is not None
            running.append(group)
        elif move == "go_live":
            live = data.draw(st.integers(live + 1, version))
            buffer.release(live)
        else:
            group = running.pop(data.draw(st.integers(0, len(running) - 1)))
            buffer.finish(group)
            if move == "drop":
                buffer.drop(group)
                dropped.add(group.prompt.prompt_id)
        assert len(buffer) <= buffer.num_slots
    outstanding = {g.prompt.prompt_id for g in buffer.outstanding()}
    assert outstanding | trained | dropped == {f"0_{i}" for i in range(served)}
    assert not outstanding & (trained | dropped)
    assert all(g.state is not State.TAKEN for g in buffer.groups)
