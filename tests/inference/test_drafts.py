"""Where drafts come from, how long they are, and up to how many tokens a step is filled with them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference import LLM, SamplingParams
from inference.replay import replay_schedule
from inference.speculative.acceptance import Acceptance
from inference.speculative.step_limit import tokens_at_the_price_of_one
from inference.speculative.suffix_drafts import SuffixDrafts
from inference.speculative.suffix_index import ORDER, SuffixIndex

PROMPTS = [[1, 10, 2, 11], [3, 10, 4, 10, 5, 11], [9] * 17, [0], [3, 10, 4, 10, 5, 11, 2, 2, 7]]


@settings(max_examples=100, deadline=None)
@given(
    shared=st.lists(st.integers(0, 3), max_size=9),
    texts=st.lists(st.lists(st.integers(0, 3), max_size=24), min_size=1, max_size=4),
    asked=st.integers(0, 3),
    most=st.integers(1, 8),
)
def test_the_longest_match_among_the_latest(shared: list[int], texts: list[list[int]], asked: int, most: int) -> None:
    index = SuffixIndex(len(shared))
    numbers = [index.add(list(shared)) for _ in texts]
    order = [(0, at) for at in range(ORDER, len(shared))]
    order += [(number, len(shared)) for number in numbers if len(shared) >= ORDER]
    index.continuation(0, 1)
    for step in range(24):  # they grow in turn
        for number, text in zip(numbers, texts, strict=True):
            index.texts[number].extend(text[step : step + 1])
            at = len(shared) + step + 1
            if at >= ORDER and step < len(text):
                order.append((number, at))
        index.continuation(0, 1)
    number = numbers[asked % len(texts)]
    text = index.texts[number]
    draft, matched = index.continuation(number, most)

    def length(source: int, at: int) -> int:
        other, count = index.texts[source][:at], 0
        while count < min(at, len(text)) and other[-1 - count] == text[-1 - count]:
            count += 1
        return count

    places = [p for p in reversed(order) if p != (number, len(text)) and length(*p) >= ORDER][:16]
    usable = [place for place in places if place[1] < len(index.texts[place[0]])]
    if not usable:
        assert (draft, matched) == ([], 0)
        return
    source, at = max(usable, key=lambda place: length(*place))  # the latest of equals
    assert matched == length(source, at)
    source = number if at < len(shared) else source
    expected = index.texts[source][at : at + most]
    while source == number and len(expected) < most:
        expected.append((text + expected)[at + len(expected)])
    assert draft == expected


def test_drafts_grow_while_they_are_right_and_are_tried_again_later() -> None:
    acceptance = Acceptance(least=0.3)
    begin = acceptance.length(3, 7)
    assert 2 <= begin < 7
    for _ in range(20):
        acceptance.observe(3, 7, 7)
    assert acceptance.length(3, 7) == 7
    for _ in range(20):
        acceptance.observe(3, 2, 0)
    assert acceptance.length(3, 7) == 0
    assert acceptance.length(20, 7) == begin, "a long match is another matter"
    waited = next(i for i in range(1000) if acceptance.length(3, 7))
    assert 5 < waited < 200


def test_a_prompt_is_brought_in_once() -> None:
    """Copies of it would be all the places that are looked at, and hide an earlier and longer match."""
    prompt = [7, 1, 2, 3, 50, 8, 1, 2, 3, 51]
    index = SuffixIndex(len(prompt))
    for own in range(40):
        index.add([*prompt, 100 + own])
    index.texts[9] += [7, 1, 2, 3]
    assert index.continuation(9, 2) == ([50, 8], 4)
    assert index.num_indexed == (11 - 2) + 39 * 2 + 4


@pytest.mark.parametrize("n", [1, 20])
def test_texts_of_closed_prompts_are_kept_within_bounds(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Also where the batch is too full for anybody to draft."""
    monkeypatch.setattr("inference.speculative.suffix_drafts._KEPT_TOKENS", 50 * n)
    llm = LLM(model_folder, threads=1, speculative="suffix")
    for prompt in PROMPTS:
        llm.generate([prompt], SamplingParams(n=n, max_tokens=20, ignore_eos=True))
    speculation = llm.engine.speculation
    assert isinstance(speculation, SuffixDrafts) and not speculation._open
    kept = [sum(map(len, texts.index.texts)) for texts in speculation._idle.values()]
    assert 1 <= len(kept) < len(PROMPTS) and sum(kept) == speculation._idle_tokens <= 50 * n


def test_the_texts_of_a_prompt_that_is_asked_again_and_again_begin_anew(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.speculative.suffix_drafts.MOST_TOKENS", 1000)
    llm = LLM(model_folder, threads=1, speculative="suffix")
    for _ in range(8):
        llm.generate([PROMPTS[0]], SamplingParams(n=20, max_tokens=20, ignore_eos=True))
    assert isinstance(llm.engine.speculation, SuffixDrafts)
    [texts] = llm.engine.speculation._idle.values()
    assert sum(map(len, texts.index.texts)) < 1000 + 20 * 24


def test_an_index_that_is_full_takes_in_the_text_that_is_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.speculative.suffix_index.MOST_TOKENS", 10)
    index = SuffixIndex()
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [7, 6, 5, 4, 3], [8, 7, 6, 5, 4, 8, 7, 6]]
    for text in texts:
        index.add(text)
    assert index.continuation(0, 2) == ([6, 7], 5)
    assert index.continuation(2, 2) == ([5, 4], 3)
    assert index.num_indexed == sum(len(texts[number]) + 1 - ORDER for number in (0, 2))


# Up to how many tokens


@pytest.mark.parametrize(
    ("milliseconds", "most", "tokens"),
    [
        ({1: 25.3, 2: 25.6, 4: 26.1, 8: 27.1, 16: 33.2, 32: 69.6}, 64, 16),  # SmolLM2 on two cores, see docs/LOG.md
        ({1: 25.3, 2: 25.6, 4: 26.1, 8: 27.1}, 15, 8),
        ({1: 1.0, 2: 1.5}, 64, 1),
        ({1: 1.0}, 1, 1),
        (dict.fromkeys([1, 2, 4, 8, 16, 32, 64], 1.0), 64, 64),
    ],
)
def test_the_largest_step_at_about_the_price_of_one_token(
    milliseconds: dict[int, float], most: int, tokens: int
) -> None:
    """Whoever else uses the machine makes single tries slower, and none faster."""
    late = iter([0.0, 90.0, 0.0, 0.0, 40.0, 0.0, 0.0] * 40)
    assert tokens_at_the_price_of_one(lambda count: milliseconds[count] + next(late), most=most) == tokens


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_step": 5}, {"kv_cache_tokens": 8, "block_size": 4}])
def test_an_engine_that_measures_says_the_same_and_its_schedule_comes_out_again(
    model_folder: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    params = SamplingParams(n=2, max_tokens=4, temperature=0, ignore_eos=True)
    plain = LLM(model_folder, threads=1, **options)
    llm = LLM(
        model_folder, threads=1, speculative="suffix", speculative_step_tokens=0, schedule_dir=str(tmp_path), **options
    )
    room = min(64, options.get("max_tokens_per_step", 64), options.get("kv_cache_tokens", 64))
    assert 1 <= llm.engine.speculation.step_tokens <= room
    outs = [[s.token_ids for out in one.generate(PROMPTS[:1] * 2, params) for s in out.samples] for one in (plain, llm)]
    assert outs[0] == outs[1] and llm.stats()["kv_usage"] == 0
    report = replay_schedule(tmp_path / "llm.jsonl")
    assert report.divergence is None and report.steps == llm.stats()["steps"]
