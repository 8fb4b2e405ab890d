"""Conversations: a later turn computes what is new, from the very tokens of the earlier ones."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from inference.server.chat import ChatPrompts
from inference.server.refusal import Refusal
from inference.tokenizer import Tokenizer

ASSISTANT = {"role": "assistant"}


def test_the_second_turn_computes_only_what_is_new(running: Any) -> None:
    ask = {"temperature": 0, "max_tokens": 24, "return_token_ids": True}
    first = running.chat("12345678", **ask)
    said = first["choices"][0]["message"]["content"]
    before = running.engine.stats()
    second = running.chat("12345678", said, "91", **ask)
    computed = running.engine.stats()["prefill_tokens_computed"] - before["prefill_tokens_computed"]
    prompt = second["choices"][0]["prompt_token_ids"]
    known = len(first["choices"][0]["prompt_token_ids"]) + len(said)
    new = len(prompt) - known
    assert new == len("-a91-b")
    # Whole blocks are found again; the last drawn token was never computed.
    assert new <= computed <= new + running.engine.config.block_size + 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - computed


def test_a_stream_is_remembered_too(running: Any) -> None:
    asked = {"messages": [{"role": "user", "content": "876543"}], "temperature": 0, "max_tokens": 20, "stream": True}
    list(running.client.post("/v1/chat/completions", json=asked).iter_lines())
    whole = running.chat("876543", temperature=0, max_tokens=20)
    said = whole["choices"][0]["message"]["content"]
    assert running.chat("876543", said, "9", max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 20


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that makes one token of "xy", where a model may have drawn two."""
    folder: Path = tmp_path_factory.mktemp("pairs")
    vocabulary = {token: index for index, token in enumerate(["x", "y", "xy", "-", "<end>"])}
    fast = Fast(models.BPE(vocabulary, [("x", "y")]))
    fast.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>")
    wrapped.chat_template = "{% for m in messages %}{{ m.content }}-{% endfor %}"
    wrapped.save_pretrained(folder)
    return Tokenizer(folder)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_ids_stay_as_they_were_drawn(pairs: Tokenizer) -> None:
    chats = ChatPrompts(pairs, max_prompt_tokens=100)
    options: dict[str, Any] = {"tools": None, "options": {}}
    first = chats.encode([user("xy")], **options)
    assert first.token_ids == [2, 3]
    chats.remember(first, [[0, 1, 0]])
    again = [user("xy"), {**ASSISTANT, "content": "xyx", "refusal": None}, user("y")]
    second = chats.encode(again, **options)
    assert second.token_ids == [2, 3, 0, 1, 0, 3, 1, 3], "drawn as x, y, x"
    chats.remember(second, [[0, 1]])
    third = chats.encode([*again, {**ASSISTANT, "content": "xy"}, user("x")], **options)
    assert third.token_ids == [*second.token_ids, 0, 1, 3, 0, 3]
    for other in (
        [user("xy"), {**ASSISTANT, "content": "xyy"}, user("y")],
        [user("x"), {**ASSISTANT, "content": "xyx"}, user("y")],
    ):
        fresh = chats.encode(other, **options)
        assert fresh.token_ids == pairs.encode(fresh.text, special=False), "another history"


def test_an_answer_that_is_not_all_in_its_text_is_forgotten(pairs: Tokenizer) -> None:
    chats = ChatPrompts(pairs, max_prompt_tokens=100)
    first = chats.encode([user("x")], tools=None, options={})
    chats.remember(first, [[0, 4, 1]])  # a special token in the middle
    second = chats.encode([user("x"), {**ASSISTANT, "content": "xy"}], tools=None, options={})
    assert second.token_ids == [0, 3, 2, 3]


def test_memory_is_bounded(pairs: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.server.chat.MAX_REMEMBERED_TOKENS", 12)
    chats = ChatPrompts(pairs, max_prompt_tokens=100)
    for text in ("x", "y", "xy", "yx"):
        chats.remember(chats.encode([user(text)], tools=None, options={}), [[0, 1]])
    assert chats._num_tokens == sum(len(past.token_ids) for past in chats._pasts.values()) <= 12
    kept = chats.encode([user("yx"), {**ASSISTANT, "content": "xy"}], tools=None, options={})
    assert kept.token_ids == [1, 0, 3, 0, 1, 3]


def test_a_template_that_refuses_says_so(pairs: Tokenizer, tmp_path: Path) -> None:
    wrapped = PreTrainedTokenizerFast.from_pretrained(pairs.folder)
    for template, says in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "refuses"),
    ):
        wrapped.chat_template = template
        wrapped.save_pretrained(tmp_path)
        with pytest.raises(Refusal, match=says):
            ChatPrompts(Tokenizer(tmp_path), max_prompt_tokens=9).encode([user("x")], tools=None, options={})
