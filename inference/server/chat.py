"""From chat messages to token ids, with the ids of earlier turns kept as they were generated.

A second turn sends back what the first one answered, as text. Encoded anew, that text may become other tokens than
those the model drew: the prefix cache would miss from there on, and the model would read a past it never wrote. So each
answer is remembered by the conversation it ends, together with the ids of that conversation. They are taken again if
the rendered text of the new request begins with exactly the same text; whatever differs (a template that strips the
answer, an edited history) is encoded from its text.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from inference.server.refusal import Refusal
from inference.tokenizer import Tokenizer

_TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
    NotImplementedError,
)
Messages = Items[Mapping[str, Any]]
Tools = Items[Mapping[str, Any]] | None
MAX_REMEMBERED_TOKENS = 1 << 22  # over all conversations, the least recently used go first; 4 bytes each


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Messages
    text: str
    """as rendered, up to where the answer begins"""
    token_ids: list[int]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Past:
    num_characters: int
    digest: bytes
    """of the rendered text, the answer included"""
    token_ids: "array[int]"


class ChatPrompts:
    """Used from one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, *, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._pasts: OrderedDict[bytes, _Past] = OrderedDict()
        self._num_tokens = 0

    def encode(self, messages: Messages, *, tools: Tools, options: Mapping[str, Any]) -> ChatPrompt:
        """Raises Refusal."""
        if not self._tokenizer.has_chat_template:
            raise Refusal(400, "this model has no chat template; use /v1/completions")
        reserved = {"conversation", "tokenize", "return_dict", "return_tensors", "chat_template"} & set(options)
        if reserved:
            raise Refusal(422, f"chat_template_kwargs may not set {min(reserved)!r}", param="chat_template_kwargs")
        try:
            text = self._render(messages, tools, options)
        except _TEMPLATE_ERRORS as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            raise Refusal(400, f"the chat template refuses these messages: {reason}", param="messages") from None
        check_length(text, self._tokenizer, self._max_prompt_tokens)
        hidden = tools and not self._shows_tools(messages, options, text)
        warnings = ["tools: this model's chat template does not show them to the model"] if hidden else []
        past = self._find(messages, text)
        if past is not None:
            ids = past.token_ids.tolist()
            rest = text[past.num_characters :]
            new = self._tokenizer.encode(rest, special=False)
            if self._follows(ids[-1:], new, rest):
                return ChatPrompt(messages, text, ids + new, warnings)
        return ChatPrompt(messages, text, self._tokenizer.encode(text, special=False), warnings)

    def remember(self, prompt: ChatPrompt, answers: Items[Items[int]]) -> None:
        """Each of `answers` without the id that ended it."""
        for ids in answers:
            answer = self._tokenizer.decode(ids)
            if ids and self._tokenizer.decode(ids, skip_special=False) == answer:  # else it is not all in the text
                self._keep(prompt, answer, ids)

    def _render(self, messages: Messages, tools: Tools, options: Mapping[str, Any]) -> str:
        return self._tokenizer.render_chat(
            messages, **{"tools": tools or None, "add_generation_prompt": True, **options}
        )

    def _shows_tools(self, messages: Messages, options: Mapping[str, Any], text: str) -> bool:
        """Whether `text`, rendered with tools, is another one without."""
        try:
            return self._render(messages, None, options) != text
        except _TEMPLATE_ERRORS:  # a template that cannot do without tools reads them
            return True

    def _keep(self, prompt: ChatPrompt, answer: str, ids: Items[int]) -> None:
        key = _keys([*prompt.messages, {"role": "assistant", "content": answer}])[-1]
        text = prompt.text + answer
        self._forget(key)
        self._pasts[key] = _Past(len(text), _digest(text), array("i", [*prompt.token_ids, *ids]))
        self._num_tokens += len(self._pasts[key].token_ids)
        while self._num_tokens > MAX_REMEMBERED_TOKENS:
            self._forget(next(iter(self._pasts)))

    def _find(self, messages: Messages, text: str) -> _Past | None:
        for key in reversed(_keys(messages)):
            past = self._pasts.get(key)
            if past is not None and _digest(text[: past.num_characters]) == past.digest:
                self._pasts.move_to_end(key)
                return past
        return None

    def _follows(self, last: list[int], new: list[int], rest: str) -> bool:
        """Some tokenizers begin every text with a space: then new ids do not say what the text says."""
        decode = self._tokenizer.decode
        return decode(last + new, skip_special=False) == decode(last, skip_special=False) + rest

    def _forget(self, key: bytes) -> None:
        past = self._pasts.pop(key, None)
        if past is not None:
            self._num_tokens -= len(past.token_ids)


def check_length(text: str, tokenizer: Tokenizer, max_prompt_tokens: int) -> None:
    """Refuse what is too long whatever its tokens are, before it costs anything. Raises Refusal."""
    least = -(-len(text) // tokenizer.longest_token)
    if least > max_prompt_tokens:
        raise Refusal(
            400,
            f"the prompt has {len(text)} characters, {least} tokens or more; at most {max_prompt_tokens} fit",
            param="messages",
            code="context_length_exceeded",
        )


def _keys(messages: Messages) -> list[bytes]:
    """One for each beginning of a conversation: what was said by whom. Whatever else clients put into a message may
    change from turn to turn."""
    keys, key = [], b""
    for message in messages:
        said = json.dumps([message.get("role"), message.get("content"), message.get("tool_calls")])
        key = hashlib.blake2b(said.encode(), digest_size=16, key=key).digest()
        keys.append(key)
    return keys


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
