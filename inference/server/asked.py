"""Request bodies: what clients may ask for, checked before anything is done about it.

Names and defaults are OpenAI's, extensions vLLM's. A field that would change the answer and is not served is refused;
one that is merely unknown is ignored, and the answer says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError
from pydantic_core import from_json

from inference.server.refusal import Refusal
from olmorl.contract.generation import SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 32, 1024
SEEDS = 1 << 63

# Asked for and not done, each would make another answer than the client believes to get. These values ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "lora_request": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (0, False),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
}
# About accounting and routing at OpenAI; an answer is the same with and without them.
_HARMLESS = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}

Count = Annotated[StrictInt, Field(ge=1, lt=SEEDS)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]  # beyond that it is no float32
TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class Body(BaseModel):
    """What both kinds of request share. null stands for the default, as with OpenAI."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    n: Count | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=SEEDS)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[StrictInt, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    return_token_ids: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    """seconds after which the request ends with what it has"""

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Raises Refusal."""
        try:
            body = cls.model_validate_json(content)
        except ValidationError as error:
            raise _refusal_of(error) from None
        for name, value in (body.model_extra or {}).items():
            harmless = _REFUSED.get(name)
            if harmless is not None and value is not None and value not in harmless:
                raise Refusal(422, f"{name} = {_short(value)} is not supported by this server", param=name)
        return body

    @property
    def warnings(self) -> list[str]:
        unknown = [name for name in self.model_extra or {} if name not in _REFUSED and name not in _HARMLESS]
        return [f"unknown field {name[:64]!r} is ignored" for name in unknown[:32]]

    def params(self, *, max_tokens: int, num_logprobs: int) -> SamplingParams:
        """`max_tokens` where the body names none. Raises Refusal."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise Refusal(400, f"a stop string is longer than {MAX_STOP_LENGTH} characters", param="stop")
        given: dict[str, Any] = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "max_tokens": self.max_tokens if self.max_tokens is not None else max_tokens,
            "min_tokens": self.min_tokens,
            "stop": tuple(stops),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
            "logprobs": num_logprobs,
            "logprobs_mode": self.logprobs_mode or "raw",
        }
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except ValueError as error:
            message = str(error).removeprefix("SamplingParams.")
            raise Refusal(400, message, param=message.partition(" ")[0]) from None


class CompletionBody(Body):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | StrictBool | None = None
    """how many likeliest tokens beside each; 0 and true: the token alone"""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Raises Refusal."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise Refusal(400, "prompt is an empty list", param="prompt")
        texts = [item for item in self.prompt if isinstance(item, str)]
        ids = [item for item in self.prompt if isinstance(item, int)]
        lists = [item for item in self.prompt if isinstance(item, list)]
        return [ids] if ids else [*texts, *lists]


class ChatBody(Body):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """As chat templates want them: content is text, arguments of tool calls are objects. Raises Refusal."""
        if not self.messages:
            raise Refusal(400, "messages is empty", param="messages")
        return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)]

    @property
    def plain_tools(self) -> list[dict[str, Any]] | None:
        return None if (self.model_extra or {}).get("tool_choice") == "none" else self.tools


@dataclass(frozen=True, slots=True)
class Wanted:
    """How an answer is to look, beside its samples."""

    stream: bool
    include_usage: bool
    logprobs: bool
    num_top: int
    raw: bool
    token_ids: bool
    warnings: list[str]

    @classmethod
    def of(cls, body: CompletionBody | ChatBody) -> "Wanted":
        if isinstance(body, ChatBody):
            logprobs, num_top = bool(body.logprobs), body.top_logprobs or 0
            if num_top and not logprobs:
                raise Refusal(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        else:
            logprobs = body.logprobs is not None and body.logprobs is not False
            num_top = 0 if isinstance(body.logprobs, bool) else body.logprobs or 0
        stream = bool(body.stream)
        options = body.stream_options
        return cls(
            stream=stream,
            include_usage=stream and options is not None and bool(options.include_usage),
            logprobs=logprobs,
            num_top=num_top,
            raw=body.logprobs_mode != "processed",
            token_ids=bool(body.return_token_ids),
            warnings=body.warnings,
        )


def _refusal_of(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_context=False, include_input=True)[0]
    # Of a union only the field says something; its branches are named behind it.
    place = first["loc"][0] if first["loc"] else None
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if place is None:
        return Refusal(400, f"the body is not a JSON object: {first['msg']}")
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return Refusal(400, f"{place} is missing", param=str(place))
    reasons = dict.fromkeys(e["msg"] for e in error.errors(include_url=False) if e["loc"][:1] == (place,))
    return Refusal(400, f"{place}: {'; or '.join(list(reasons)[:4])}", param=str(place))


def _plain_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise Refusal(400, f"{place} has no role", param="messages")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_text_of(part, place) for part in content)
    elif content is None:
        if role != "assistant":
            raise Refusal(400, f"{place} has no content", param="messages")
        plain["content"] = ""
    elif not isinstance(content, str):
        raise Refusal(400, f"{place}: content is no text", param="messages")
    if message.get("tool_calls") is not None:
        plain["tool_calls"] = [_plain_call(call, place) for call in _list_of_dicts(message["tool_calls"], place)]
    return plain


def _text_of(part: object, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and kind != "text":
        raise Refusal(
            422, f"{place}: content of type {kind[:64]!r} is not supported; this model reads text", param="messages"
        )
    raise Refusal(400, f"{place}: a part of content is no text", param="messages")


def _plain_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"{place}: a tool call names no function", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:  # with the bounds that a body has: on depth, and no half characters
            arguments = from_json(arguments, allow_inf_nan=False)
        except ValueError:
            raise Refusal(400, f"{place}: arguments of a tool call are no JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _list_of_dicts(value: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refusal(400, f"{place}: tool_calls is no list of objects", param="messages")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def deadline_seconds(body: Body, limit: float) -> float:
    return min(body.timeout or math.inf, limit)
