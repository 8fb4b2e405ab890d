"""Longest expected first: nothing lost, nothing read too early."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from olmorl.data.prompt import Prompt
from olmorl.rollouts.lookahead import Lookahead

sources = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=40)


def prompts(rows: list[tuple[str, int]], served: list[int]) -> Iterator[Prompt]:
    for index, (source, length) in enumerate(rows):
        served.append(index)
        ids = np.zeros(length, np.int32)
        yield Prompt(index=index, token_ids=ids, text="", checks=(), data_source=source, epoch=0, position=index)


@given(rows=sources, size=st.integers(1, 10), lengths=st.dictionaries(st.sampled_from("abc"), st.integers(1, 99)))
def test_every_prompt_once_and_the_longest_of_those_in_sight(
    rows: list[tuple[str, int]], size: int, lengths: dict[str, int]
) -> None:
    served: list[int] = []
    lookahead = Lookahead(prompts(rows, served), size=size, guess=50)
    for source, length in lengths.items():
        lookahead.finished(source, length)
    taken: list[int] = []
    while (prompt := lookahead.pop()) is not None:
        in_sight = [i for i in served if i not in taken]
        assert len(in_sight) <= size
        best = max((lengths.get(rows[i][0], 50), rows[i][1]) for i in in_sight)
        source = lengths.get(prompt.data_source, 50)
        assert source == best[0]
        assert len(prompt.token_ids) == max(rows[i][1] for i in in_sight if rows[i][0] == prompt.data_source)
        taken.append(prompt.index)
    assert sorted(taken) == list(range(len(rows)))
