"""One sample of several turns as one run of tokens: what the policy drew and what an environment wrote between.

Token ids are laid one behind the other and never encoded again: what the model reads in a later turn is to the token
what it wrote, and what the learner sees is to the token what the engine saw. Pure.
"""

from dataclasses import replace

import numpy as np

from olmorl.contract.generation import OBSERVED, FinishReason, RolloutSample, VersionSpan


class Episode:
    def __init__(self, prompt_token_ids: np.ndarray, *, max_tokens: int) -> None:
        """`max_tokens` is for all turns and observations together."""
        self._prompt_token_ids = prompt_token_ids
        self._max_tokens = max_tokens
        self._pieces: list[RolloutSample | np.ndarray] = []
        self._text = ""
        self.turns: list[str] = []
        """what the policy wrote, as the environment sees it"""

    def draw(self, turn: RolloutSample, text: str) -> None:
        """A turn of the policy came."""
        self._pieces.append(turn)
        self._text += text
        self.turns.append(text)

    def observe(self, token_ids: np.ndarray, text: str) -> None:
        """[T] int32 that the environment writes behind it."""
        self._pieces.append(token_ids)
        self._text += text

    @property
    def token_ids(self) -> np.ndarray:
        """[T] int32"""
        return np.concatenate([_token_ids(piece) for piece in self._pieces]).astype(np.int32)

    @property
    def context(self) -> np.ndarray:
        """[P + T] int32: what the policy reads next."""
        return np.concatenate([self._prompt_token_ids, self.token_ids]).astype(np.int32)

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._max_tokens - sum(len(_token_ids(piece)) for piece in self._pieces)

    @property
    def drawn(self) -> np.ndarray:
        """[T] bool: what the policy drew."""
        return np.concatenate([np.full(len(_token_ids(p)), isinstance(p, RolloutSample)) for p in self._pieces])

    def sample(self, finish_reason: FinishReason) -> RolloutSample:
        """All turns as one. What was observed has logprobs of 0 and the version OBSERVED."""
        turns = [piece for piece in self._pieces if isinstance(piece, RolloutSample)]
        spans: list[VersionSpan] = []
        start = 0
        for piece in self._pieces:
            if isinstance(piece, RolloutSample):
                spans += [(version, start + first, start + end) for version, first, end in piece.version_spans]
            else:
                spans.append((OBSERVED, start, start + len(piece)))
            start += len(_token_ids(piece))
        return replace(
            turns[-1],
            request_id=turns[0].request_id,
            token_ids=self.token_ids,
            logprobs=self._concatenate("logprobs"),
            raw_logprobs=self._concatenate("raw_logprobs"),
            version_spans=_join(spans),
            text=self._text,
            finish_reason=finish_reason,
            kv_events=tuple(event for turn in turns for event in turn.kv_events),
            t_first_token=turns[0].t_first_token,
        )

    def _concatenate(self, name: str) -> np.ndarray:
        parts = [
            getattr(piece, name) if isinstance(piece, RolloutSample) else np.zeros(len(piece), np.float32)
            for piece in self._pieces
        ]
        return np.concatenate(parts).astype(np.float32)


def _token_ids(piece: RolloutSample | np.ndarray) -> np.ndarray:
    return piece.token_ids if isinstance(piece, RolloutSample) else piece


def _join(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version become one span, empty ones none."""
    joined: list[VersionSpan] = []
    for version, start, end in spans:
        if start == end:
            continue
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1], end)
        else:
            joined.append((version, start, end))
    return tuple(joined)
