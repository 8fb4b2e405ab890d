"""A checkpoint's driver state brings back every prompt without a fate, once, and then the stream where it stood."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmorl.contract.errors import ConfigError
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.compose import Inputs
from olmorl.controller.loop import request_seed
from olmorl.controller.recorder import Totals
from olmorl.controller.resume import DriverState, PromptQueue
from olmorl.data.stream import PromptStream


def capture(queue: PromptQueue, buffer: RolloutBuffer, **totals: float) -> DriverState:
    return DriverState.capture(step=1, prompts=queue, buffer=buffer, totals=Totals(**totals), seed=5)


def test_round_trip_through_the_file(tmp_path: Path, inputs: Inputs) -> None:
    queue = PromptQueue(PromptStream(inputs.train, seed=5))
    buffer = RolloutBuffer(groups_per_batch=1, async_steps=2, window=4)
    for _ in range(3):
        buffer.admit(next(queue), version=0, seed=0, now=0.0)
    state = capture(queue, buffer, tokens=12, reward_first=0.5)
    state.save(tmp_path)
    assert DriverState.load(tmp_path, seed=5) == state
    assert len(state.outstanding) == 3
    with pytest.raises(ConfigError, match=r"run.seed = 5, the config says 6; keep the seed"):
        DriverState.load(tmp_path, seed=6)


def test_the_state_is_of_one_instant(inputs: Inputs) -> None:
    """What the run adds up afterwards is not in it."""
    queue, totals = PromptQueue(PromptStream(inputs.train, seed=5)), Totals()
    buffer = RolloutBuffer(groups_per_batch=1, async_steps=0, window=0)
    state = DriverState.capture(step=0, prompts=queue, buffer=buffer, totals=totals, seed=5)
    totals.tokens, totals.waste = 7, {"trained": 7}
    next(queue)
    assert state.totals == Totals() and state.stream["position"] == 0


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_or_served_twice_over_many_restarts(data: st.DataObject, inputs: Inputs) -> None:
    """Random admissions, fates and restarts: each occurrence meets one fate along the lineage, none is skipped."""
    queue = PromptQueue(PromptStream(inputs.train, seed=5))
    settled: set[tuple[int, int]] = set()
    for _ in range(data.draw(st.integers(1, 4))):
        buffer = RolloutBuffer(groups_per_batch=2, async_steps=2, window=4)
        for _ in range(data.draw(st.integers(0, 12))):
            if buffer.has_free_slot() and data.draw(st.booleans()):
                buffer.admit(next(queue), version=0, seed=0, now=0.0)
                buffer.claim()
            elif groups := buffer.groups:
                group = data.draw(st.sampled_from(groups))
                buffer.finish(group)
                buffer.drop(group)
                occurrence = (group.prompt.epoch, group.prompt.position)
                assert occurrence not in settled
                settled.add(occurrence)
        state = capture(queue, buffer)
        queue = state.prompts(PromptStream(inputs.train, seed=5))
        without_fate = {(p.epoch, p.position) for p in queue.again}
        assert not without_fate & settled
        position = queue.state()["position"]
        assert without_fate | settled == {(0, i) for i in range(position)}


def test_again_comes_before_the_stream(inputs: Inputs) -> None:
    stream = PromptStream(inputs.train, seed=5)
    first, second = stream.next(), stream.next()
    queue = PromptQueue(stream, [second, first])
    assert [next(queue).position for _ in range(3)] == [1, 0, 2]


def test_an_occurrence_has_its_seed_in_every_attempt(inputs: Inputs) -> None:
    stream = PromptStream(inputs.train, seed=5)
    prompts = [stream.prompt_at(epoch, position) for epoch in range(2) for position in range(500)]
    seeds = [request_seed(5, prompt) for prompt in prompts]
    assert seeds == [request_seed(5, prompt) for prompt in prompts]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(6, prompts[0]) != seeds[0]
