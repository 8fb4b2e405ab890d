"""Draw one sample of a run again, from its record: seed, sampling, and which weights computed what.

An engine without company takes the same way. Where the record says that weights were swapped or the KV cache was
computed anew (`kv_events`), the same happens at the same position, so that each token is drawn by the same weights from
keys and values of the same mixture of versions. What the record does not hold is who shared the batch, and that must
make no difference.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from inference.engine import Engine
from inference.request import Sequence as Sample
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, KvEvent, SamplingParams

Weights = Callable[[int], Iterable[tuple[str, torch.Tensor]]]
"""(name, tensor) of each parameter of a policy version; never asked for version 0, which is the model itself"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """What one request drew for one sample. P prompt tokens, T drawn ones."""

    start: int
    """place of its first token in the sample"""
    prompt_token_ids: np.ndarray  # [P] int32, earlier turns and observations included
    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    kv_events: tuple[KvEvent, ...]
    """begins with the prefill; positions count from the first token of the prompt"""


@dataclass(frozen=True, slots=True)
class RolloutReplay:
    tokens: int
    """that came out the same"""
    logprob_difference: float
    """the largest of these tokens, nats"""
    divergence: str | None
    """what the next token was in the run, and is here"""

    def __str__(self) -> str:
        if self.divergence is not None:
            return f"diverged at token {self.tokens}: {self.divergence}"
        return f"identical: {self.tokens} tokens, logprobs within {self.logprob_difference:.1e}"


def effective_events(events: Sequence[KvEvent]) -> list[KvEvent]:
    """Without those that another replaced before anything was computed: their weights are not needed."""
    kept: list[tuple[KvEvent, int]] = []
    for event in events:
        position, _, kind = event
        if kind == "swap":
            length = max(position + 1, kept[-1][1])
            if kept[-1][0][0] == position and kept[-1][0][2] == "swap":
                kept.pop()
        else:
            length = position
            while kept and kept[-1][1] == length and kept[-1][0][2] != "prefill":
                kept.pop()
        kept.append((event, length))
    return [event for event, _ in kept]


def needed_versions(turns: Iterable[RecordedTurn]) -> list[int]:
    return sorted({version for turn in turns for _, version, _ in effective_events(turn.kv_events)})


def replay_rollout(
    config: EngineConfig, params: SamplingParams, *, sample: int, turns: Sequence[RecordedTurn], weights: Weights
) -> RolloutReplay:
    """`config` and `params`, the seed included, are those of the run. Stops at the first token that differs."""
    longest = max(len(turn.prompt_token_ids) + len(turn.token_ids) for turn in turns)
    engine = Engine(
        replace(
            config,
            max_num_seqs=1,
            kv_cache_tokens=longest + config.block_size,
            prefix_caching=False,  # which would give back what is to be computed anew
            batching="continuous",
            overlap=False,
            speculative=None,  # several tokens a step might go past an event
            draft_model=None,
            schedule_dir=None,
        ),
        initial_version=0,
    )
    replay = _Replay(engine, params, sample, weights)
    try:
        for turn in turns:
            divergence = replay.play(turn)
            if divergence is not None:
                return RolloutReplay(replay.tokens, replay.difference, divergence)
    finally:
        if engine.followers is not None:
            engine.followers.close()
    return RolloutReplay(replay.tokens, replay.difference, None)


class _Replay:
    def __init__(self, engine: Engine, params: SamplingParams, index: int, weights: Weights) -> None:
        self._engine = engine
        self._params = params
        self._index = index
        self._weights = weights
        self._tokens_per_step = engine.scheduler.max_tokens_per_step
        self.tokens = 0
        self.difference = 0.0

    def play(self, turn: RecordedTurn) -> str | None:
        """What the first token that differs is; None if none does."""
        self.tokens = turn.start
        (_, version, _), *events = effective_events(turn.kv_events)
        self._load(version)
        prompt = turn.prompt_token_ids.tolist()
        request = self._engine.add("replay", prompt, self._params, sample_indices=(self._index,))
        sample = request.sequences[0]
        try:
            for event in events:
                if divergence := self._advance(sample, turn, event):
                    return divergence
                self._apply(event)
            return self._advance(sample, turn, None)
        finally:
            self._engine.abort("replay")

    def _advance(self, sample: Sample, turn: RecordedTurn, event: KvEvent | None) -> str | None:
        """Step until `event` is due, or to the end of the turn; what differs of the tokens on the way."""
        scheduler = self._engine.scheduler
        while not self._due(sample, turn, event):
            compared = sample.num_output
            if sample.finish_reason is not None:
                return f"{_token(turn, compared)} in the run, {sample.error or 'ended by ' + sample.finish_reason} here"
            scheduler.max_tokens_per_step = self._tokens_per_step
            if event is not None and event[2] == "swap":  # may lie in the middle of a prompt
                scheduler.max_tokens_per_step = min(self._tokens_per_step, event[0] - sample.num_computed)
            self._engine.step()
            for at in range(compared, min(sample.num_output, len(turn.token_ids))):
                token, logprob = sample.output_ids[at], sample.logprobs[at]
                if token != turn.token_ids[at]:
                    return f"{_token(turn, at)} in the run, {token} (logprob {logprob:.4f}) here"
                self.tokens = turn.start + at + 1
                self.difference = max(self.difference, abs(logprob - float(turn.logprobs[at])))
        return None

    def _due(self, sample: Sample, turn: RecordedTurn, event: KvEvent | None) -> bool:
        if event is None:
            return sample.num_output == len(turn.token_ids)
        position, _, kind = event
        reached = sample.num_computed if kind == "swap" else sample.num_tokens
        if reached > position:
            raise ConfigError(f"the record contradicts itself: {kind} at position {position}, after position {reached}")
        return reached == position

    def _apply(self, event: KvEvent) -> None:
        _, version, kind = event
        recompute = kind == "recompute"
        if version != self._engine.version:
            self._engine.update_weights(self._weights(version), version, kv="recompute" if recompute else "keep")
        elif recompute:
            self._engine.scheduler.change_version(version, recompute=True)

    def _load(self, version: int) -> None:
        if version != self._engine.version:
            self._engine.update_weights(self._weights(version), version)


def _token(turn: RecordedTurn, at: int) -> str:
    return f"{turn.token_ids[at]} (logprob {turn.logprobs[at]:.4f})"
