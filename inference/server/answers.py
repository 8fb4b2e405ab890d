"""Answers in OpenAI's shapes: whole, or one chunk for each piece of a stream."""

import time
import uuid
from collections.abc import Sequence as Items
from typing import Any

from inference.server.asked import Wanted
from inference.server.generation import Generation
from inference.server.reader import Piece
from inference.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON knows no infinity; OpenAI's own stand-in


class TokenTexts:
    """The text of single tokens, decoded once each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer if tokenizer.exists else None
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            no_text = self._tokenizer is None
            text = f"token_id:{token_id}" if no_text else self._tokenizer.decode([token_id], skip_special=False)  # type: ignore[union-attr]
            self._known[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> list[int]:
        """Those of all tokens together are the text, also where a character is more than one token."""
        text = self(token_id)
        if self._tokenizer is not None and "\N{REPLACEMENT CHARACTER}" in text:
            return list(self._tokenizer.bytes_of(token_id))
        return list(text.encode())


class Answer:
    """One response; `index` counts its choices, n for each prompt."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, wanted: Wanted, *, model: str, texts: TokenTexts, generations: Items[Generation]) -> None:
        self.wanted = wanted
        self._texts = texts
        self._generations = generations
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Items[Piece]) -> dict[str, Any]:
        """Every sample as one piece, in the order of the choices."""
        choices = [self._whole_choice(index, piece) for index, piece in enumerate(pieces)]
        return {**self._base(self.kind), "choices": choices, "usage": self._usage(), **self._warnings()}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any token."""
        return []

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        return {**self._base(self.chunk_kind), "choices": [self._chunk_choice(index, piece)], **self._warnings()}

    def closing(self) -> list[dict[str, Any]]:
        """Chunks after the last token."""
        if not self.wanted.include_usage:
            return []
        return [{**self._base(self.chunk_kind), "choices": [], "usage": self._usage()}]

    def _base(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind}

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _warnings(self) -> dict[str, Any]:
        return {"warnings": self.wanted.warnings} if self.wanted.warnings else {}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(g.prompt) for g in self._generations)
        completion = sum(len(s.raw_logprobs) for g in self._generations for s in g.sequences)
        cached = sum(g.request.num_cached for g in self._generations if g.request is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _ending(self, index: int, piece: Piece) -> dict[str, Any]:
        """What a choice says beside its text."""
        said: dict[str, Any] = {"index": index, "finish_reason": piece.finish_reason}
        if piece.error is not None:
            said["error"] = piece.error
        if self.wanted.token_ids:
            said["token_ids"] = piece.token_ids
            if piece.finish_reason is not None:
                generation = self._generations[index // self._generations[0].params.n]
                said["prompt_token_ids"] = generation.prompt
                said["version_spans"] = piece.version_spans
        return said

    def _token_logprobs(self, piece: Piece) -> list[float]:
        return [_sayable(x) for x in (piece.raw_logprobs if self.wanted.raw else piece.logprobs)]


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, int] = {}  # where the text of a choice's next token begins

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(index, piece) if self.wanted.logprobs else None
        return {"text": piece.text, "logprobs": logprobs, **self._ending(index, piece)}

    _chunk_choice = _whole_choice

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        tokens = [self._texts(token) for token in piece.token_ids]
        offsets, offset = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        top = [{self._texts(token): _sayable(x) for token, x in pairs} for pairs in piece.top_logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": self._token_logprobs(piece),
            "top_logprobs": top if self.wanted.num_top else None,
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self) -> list[dict[str, Any]]:
        number = sum(g.params.n for g in self._generations)
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(number)]
        return [{**self._base(self.chunk_kind), "choices": [choice]} for choice in choices]

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(piece), **self._ending(index, piece)}

    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {"delta": delta, "logprobs": self._logprobs(piece), **self._ending(index, piece)}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self.wanted.logprobs:
            return None
        content = [
            {**self._token(token, logprob), "top_logprobs": [self._token(*pair) for pair in top]}
            for token, logprob, top in zip(
                piece.token_ids,
                self._token_logprobs(piece),
                piece.top_logprobs or [[]] * len(piece.token_ids),
                strict=True,
            )
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        bytes_ = self._texts.bytes_of(token_id)
        return {"token": self._texts(token_id), "logprob": _sayable(logprob), "bytes": bytes_}


def _sayable(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
