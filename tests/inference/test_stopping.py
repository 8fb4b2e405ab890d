"""Stop strings on tokens of several characters and characters of several tokens; EOS ids; what the text holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from inference.request import Request, Sequence
from inference.stopping import StopMatcher, finish_reason, output_text
from inference.tokenizer import Tokenizer
from olmorl.contract.generation import SamplingParams

# As a byte-level tokenizer has them: the last three are the bytes of the euro sign.
WORDS = ["a", "b", "ab", "xabz", "ĠSTOP", "\u00e2", "\u0124", "\u00ac", "<eos>"]
TEXTS = {0: "a", 1: "b", 2: "ab", 3: "xabz", 4: " STOP"}
EOS = 8


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    raw = RawTokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(folder)
    return Tokenizer(folder)


def run(tokenizer: Tokenizer, tokens: list[int], **rules: Any) -> tuple[Sequence, int]:
    """Feed tokens until the sample ends; the sequence, and how many tokens it took."""
    params = SamplingParams(max_tokens=len(tokens), **rules)
    stop_ids = frozenset((EOS, *params.stop_token_ids))
    request = Request("0", [3, 4], params, 0, 0, (0,), stop_ids=stop_ids, max_tokens=2 + params.max_tokens)
    sequence = request.sequences[0]
    if params.stop:
        sequence.stop_matcher = StopMatcher(params.stop, tokenizer, num_prompt=2)
    for token in tokens:
        sequence.token_ids.append(token)
        sequence.finish_reason = finish_reason(sequence)
        if sequence.finish_reason is not None:
            break
    return sequence, sequence.num_output


@pytest.mark.parametrize(
    ("tokens", "rules", "reason", "count", "text"),
    [
        ([0, 0, 1, 0], {"stop": ("ab",)}, "stop", 3, "a"),  # across two tokens
        ([1, 3, 0], {"stop": ("ab",)}, "stop", 2, "bx"),  # inside one token
        ([1, 3, 0], {"stop": ("z", "ab")}, "stop", 2, "bx"),  # the one that completes first, not the one named first
        ([0, 2, 1], {"stop": ("aab", "ab")}, "stop", 2, ""),  # complete at once: the longer begins earlier
        ([0, 4, 0], {"stop": ("STOP",)}, "stop", 2, "a "),
        ([0, 1], {"stop": ("ab",)}, "stop", 2, ""),  # on the last allowed token: stop, not length
        ([0, 0], {"stop": ("ab",)}, "length", 2, "aa"),
        ([2, 2, 0, 1], {"stop": ("ab",), "min_tokens": 3}, "stop", 4, "abab"),  # not looked for in the first two
        ([5, 6, 7, 0], {"stop": ("€",)}, "stop", 3, ""),  # a character of three tokens
        ([5, 6, 0, 0], {"stop": ("€",)}, "length", 4, None),  # that never becomes one
        ([0, 8, 1], {}, "stop", 2, "a"),
        ([0, 8], {}, "stop", 2, "a"),
        ([0, 3, 1], {"stop_token_ids": (3,)}, "stop", 2, "a"),
        ([0, 1, 8], {"stop_token_ids": (1,), "stop": ("b",)}, "stop", 2, "a"),  # ids before strings
    ],
)
def test_vectors(
    tokenizer: Tokenizer, tokens: list[int], rules: dict[str, Any], reason: str, count: int, text: str | None
) -> None:
    sequence, taken = run(tokenizer, tokens, **rules)
    assert (sequence.finish_reason, taken) == (reason, count)
    if text is not None:
        assert output_text(sequence, tokenizer) == text
    assert len(sequence.output_ids) == count, "the id that ended it stays"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.lists(st.text("abxzS", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_equals_a_search_in_the_whole_text_after_each_token(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str]
) -> None:
    sequence, taken = run(tokenizer, tokens, stop=tuple(stops))
    text = ""
    for index, token in enumerate(tokens):
        text += TEXTS[token]
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if found:
            assert (sequence.finish_reason, taken) == ("stop", index + 1)
            assert output_text(sequence, tokenizer) == text[: min(found)[1]]
            return
    assert (sequence.finish_reason, taken) == ("length", len(tokens))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_the_text_followed_by_stop_strings_is_the_text(tokenizer: Tokenizer, tokens: list[int]) -> None:
    sequence, _ = run(tokenizer, tokens, stop=("never",))
    followed = sequence.stop_matcher.text
    whole = tokenizer.decode(tokens)
    assert whole.startswith(followed) or "\N{REPLACEMENT CHARACTER}" in whole


def test_every_eos_id_of_the_generation_config_ends_a_sample(model_folder: str, copy_of: Callable[..., str]) -> None:
    from inference import LLM

    plain = LLM(model_folder).generate([[1, 10]], SamplingParams(seed=2, max_tokens=30, ignore_eos=True))
    drawn = plain[0].samples[0].token_ids
    folder = copy_of(generation_config={"eos_token_id": [drawn[7], drawn[4]], "temperature": 0.1})
    sample = LLM(folder).generate([[1, 10]], SamplingParams(seed=2, max_tokens=30))[0].samples[0]
    first = min(drawn.index(drawn[7]), drawn.index(drawn[4]))
    assert sample.token_ids == drawn[: first + 1] and sample.finish_reason == "stop"
    without = copy_of(generation_config=None, config={"eos_token_id": drawn[4]})
    sample = LLM(without).generate([[1, 10]], SamplingParams(seed=2, max_tokens=30))[0].samples[0]
    assert sample.token_ids == drawn[: drawn.index(drawn[4]) + 1]


def test_eos_ids_that_the_vocabulary_does_not_have_hold_nothing_back(copy_of: Callable[..., str]) -> None:
    """As an index, 1000 would break the step of all requests, and -1 would ban the last token."""
    from inference import LLM

    llm = LLM(copy_of(generation_config={"eos_token_id": [-1, 1000]}))
    held, free = llm.generate([[1, 10]] * 2, [SamplingParams(seed=2, min_tokens=m, max_tokens=6) for m in (4, 0)])
    assert held.samples[0].logprobs == free.samples[0].logprobs
