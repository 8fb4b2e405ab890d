"""What is counted, against plain sets."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.contract.errors import ConfigError
from olmorl.data.prompt import Prompt
from olmorl.rollouts.tally import Tally


def prompt(index: int, *, first: int | None = None) -> Prompt:
    ids = np.array([index if first is None else first, 5], np.int32)
    return Prompt(index=index, token_ids=ids, text="", checks=(), data_source="", epoch=0, position=index)


def add(tally: Tally, index: int, sample: int, reward: float | None = None, *, full_reward: float = 1.0) -> bool:
    verdict: Any = None if reward is None else "scored"
    return tally.add(
        index,
        sample,
        prompt_token_ids=prompt(index).token_ids,
        num_tokens=2,
        finish_reason="stop",
        reward=reward,
        full_reward=full_reward,
        verdict=verdict,
    )


@given(n=st.integers(1, 20), adds=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 19)), max_size=60))
def test_missing_is_what_was_not_added(n: int, adds: list[tuple[int, int]]) -> None:
    tally, known = Tally(n), set()
    for index, sample in adds:
        if sample < n:
            assert add(tally, index, sample) == ((index, sample) not in known)
            known.add((index, sample))
    for index in range(15):
        assert tally.missing(prompt(index)) == tuple(s for s in range(n) if (index, s) not in known)
    assert tally.summary()["samples"] == len(known) and tally.summary()["tokens"] == 2 * len(known)
    assert tally.summary()["prompts"] == len({index for index, _ in known})


def test_another_prompt_in_its_place_is_refused() -> None:
    tally = Tally(2)
    add(tally, 3, 0)
    with pytest.raises(ConfigError, match="prompt 3 is not the one"):
        tally.missing(prompt(3, first=9))


def test_pass_rates() -> None:
    tally = Tally(2)
    for index, rewards in enumerate([(0.0, 0.0), (1.0, 0.0), (1.0, 2.0), (0.5, None), (1.0,)]):
        for sample, reward in enumerate(rewards):
            add(tally, index, sample, reward)
    summary = tally.summary()
    assert summary["reward_mean"] == pytest.approx(5.5 / 8)
    assert summary["pass_rate"] == pytest.approx((0 + 0.5 + 1 + 0 + 1) / 5)
    assert (summary["solved_never"], summary["solved_sometimes"], summary["solved_always"]) == (0.4, 0.2, 0.4)
    assert summary["prompts_by_times_solved"] == {"0": 1, "1": 1, "2": 1}, "of prompts all of whose samples are scored"


def test_solved_is_what_has_the_full_reward_of_its_prompt() -> None:
    tally = Tally(2)
    for index, full in enumerate((0.6 + 0.3 + 0.1, 2.0)):
        for sample in range(2):
            add(tally, index, sample, 1.0, full_reward=full)
    assert tally.summary()["prompts_by_times_solved"] == {"0": 1, "1": 0, "2": 1}


def test_millions_of_prompts_are_megabytes() -> None:
    tally = Tally(8)
    add(tally, 4_000_000, 7)
    size = sum(len(memoryview(x).tobytes()) for x in (tally._done, tally._digests, tally._scored, tally._solved))
    assert size < 40e6
