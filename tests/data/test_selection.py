"""Which rows are served: solved ones retire, hopeless ones rest longer each time, and a checkpoint knows of both."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmorl.data.mixture import Share
from olmorl.data.prompt import Check, EncodedExample
from olmorl.data.prompt_set import PromptSet
from olmorl.data.selection import PromptSelection
from olmorl.data.stream import PromptStream


def prompt_set(num_rows: int) -> PromptSet:
    examples = tuple(
        EncodedExample(
            index=i, token_ids=np.array([i], np.int32), text=str(i), checks=(Check("gsm8k", "1"),), data_source="s"
        )
        for i in range(num_rows)
    )
    return PromptSet(examples, (Share(name="s", size=num_rows, per_epoch=num_rows),))


def select(num_rows: int, **rules: float | int | None) -> PromptSelection:
    return PromptSelection(PromptStream(prompt_set(num_rows), seed=3), num_rows=num_rows, **rules)


def rows(selection: PromptSelection, count: int) -> list[int]:
    return [selection.next().index for _ in range(count)]


def record(selection: PromptSelection, row: int, pass_rate: float | None, *, has_signal: bool = False) -> None:
    prompt = next(p for i in range(100) if (p := selection.prompt_at(0, i)).index == row)
    selection.record(prompt, pass_rate=pass_rate, has_signal=has_signal)


def test_without_rules_every_row_is_served_in_the_streams_order() -> None:
    selection, stream = select(7), PromptStream(prompt_set(7), seed=3)
    for row in range(7):
        record(selection, row, 1.0)
    assert rows(selection, 21) == [stream.next().index for _ in range(21)]


def test_a_solved_row_is_retired_and_the_others_keep_their_order() -> None:
    selection, stream = select(7, retire_pass_rate=0.875), PromptStream(prompt_set(7), seed=3)
    record(selection, 2, 0.875, has_signal=True)
    record(selection, 5, 0.75, has_signal=True)
    assert rows(selection, 12) == [row for _ in range(14) if (row := stream.next().index) != 2]
    assert (selection.num_retired, selection.num_skipped) == (1, 2)


def test_a_hopeless_row_rests_longer_each_time() -> None:
    selection = select(2, rest_steps=2)
    step = 0
    for rest in (2, 4, 8):
        record(selection, 1, 0.0)
        for _ in range(rest - 1):
            step += 1
            selection.advance(step)
            assert rows(selection, 2) == [0, 0] and selection.num_resting == 1
        step += 1
        selection.advance(step)
        assert selection.num_resting == 0 and set(rows(selection, 4)) == {0, 1}
    record(selection, 1, 0.5, has_signal=True)
    record(selection, 1, 0.0)
    selection.advance(step + 2)
    assert selection.num_resting == 0, "one success makes it a beginner again"


def test_what_carries_signal_or_was_not_scored_does_not_rest() -> None:
    selection = select(3, rest_steps=4)
    record(selection, 0, 0.0, has_signal=True)  # nobody passed, but some did better than others
    record(selection, 1, None)
    assert selection.num_resting == 0


def test_rests_end_early_where_nothing_else_is_left() -> None:
    selection = select(3, rest_steps=4, retire_pass_rate=1.0)
    record(selection, 0, 1.0)
    record(selection, 1, 0.0)
    selection.advance(1)
    record(selection, 2, 0.0)
    assert set(rows(selection, 4)) == {1}, "the row that has rested longest comes back first"
    assert selection.has_next


def test_there_is_no_next_when_all_are_retired() -> None:
    selection = select(2, retire_pass_rate=1.0)
    for row in range(2):
        assert selection.has_next
        record(selection, row, 1.0)
    assert not selection.has_next
    with pytest.raises(AssertionError, match="every row is retired"):
        selection.next()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 8))
def test_a_restored_selection_serves_what_the_first_would_have(data: st.DataObject, num_rows: int) -> None:
    rules = {
        "retire_pass_rate": data.draw(st.sampled_from([None, 0.5, 1.0])),
        "rest_steps": data.draw(st.integers(0, 3)),
    }
    selection, twin = select(num_rows, **rules), select(num_rows, **rules)
    step = 0
    for _ in range(data.draw(st.integers(0, 30))):
        if data.draw(st.booleans()):
            step += 1
            selection.advance(step)
        elif selection.has_next:
            rate = data.draw(st.sampled_from([None, 0.0, 0.25, 1.0]))
            selection.record(selection.next(), pass_rate=rate, has_signal=rate == 0.25)
    twin.restore(json.loads(json.dumps(selection.state())))
    assert (twin.num_retired, twin.num_resting, twin.has_next) == (
        selection.num_retired,
        selection.num_resting,
        selection.has_next,
    )
    if selection.has_next:
        assert rows(twin, 10) == rows(selection, 10)


def test_the_state_is_of_one_instant() -> None:
    selection = select(3, retire_pass_rate=1.0)
    state = selection.state()
    record(selection, 0, 1.0)
    assert state["pass_rates"] == {}
