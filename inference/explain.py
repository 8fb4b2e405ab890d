"""Why a token can or cannot be drawn: the sampler's rules applied one after another, and what each took away.

Nothing is computed a second way: every stage is the sampler itself, asked with the rules up to that stage.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from inference.request import Request
from inference.sampler import SamplingTable, process
from olmorl.contract.generation import SamplingParams

# The order in which rules that remove tokens apply, and what turns each off.
_OFF: dict[str, Any] = {"min_tokens": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class SamplingExplanation:
    removed: dict[str, tuple[int, ...]]
    """for each rule that is on, in the order in which they apply: the token ids that it took away"""
    probabilities: np.ndarray  # [V] float32, what the token is drawn from; one-hot where greedy
    logprobs: np.ndarray  # [V] float32, what a sample's `logprobs` would record; -inf for what was taken away
    raw_logprobs: np.ndarray  # [V] float32, log-softmax of the untouched logits


def explain_sampling(
    logits: torch.Tensor | np.ndarray | Items[float],
    params: SamplingParams,
    *,
    prompt_token_ids: Items[int] = (),
    output_token_ids: Items[int] = (),
    eos_token_ids: Items[int] = (),
) -> SamplingExplanation:
    """What `params` make of the logits [V] of the token that follows prompt and output.

    >>> import math
    >>> logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    >>> explanation = explain_sampling(logits, SamplingParams(top_k=2, top_p=0.6))
    >>> explanation.removed
    {'top_k': (2, 3), 'top_p': (1,)}
    >>> explanation.probabilities.tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    logits_V = torch.as_tensor(np.asarray(logits), dtype=torch.float32)
    if logits_V.ndim != 1 or not len(logits_V):
        raise ValueError(f"logits have shape {tuple(logits_V.shape)}; give those of one token, [V]")
    for token in (*prompt_token_ids, *output_token_ids, *eos_token_ids, *params.stop_token_ids):
        if not 0 <= token < len(logits_V):
            raise ValueError(f"token id {token} is outside the vocabulary [0, {len(logits_V)})")
    history = _History(tuple(prompt_token_ids), tuple(output_token_ids), tuple(eos_token_ids))
    stage = replace(params, **_OFF)
    final_V = _processed(logits_V, stage, history)
    removed: dict[str, tuple[int, ...]] = {}
    for rule, off in _OFF.items():
        if getattr(params, rule) != off:
            stage = replace(stage, **{rule: getattr(params, rule)})
            before_V, final_V = final_V, _processed(logits_V, stage, history)
            gone_V = torch.isfinite(before_V) & ~torch.isfinite(final_V)
            removed[rule] = tuple(gone_V.nonzero()[:, 0].tolist())
    probabilities_V = final_V.softmax(0)
    if params.greedy:
        chosen = int(final_V.argmax())
        removed["greedy"] = tuple(t for t in torch.isfinite(final_V).nonzero()[:, 0].tolist() if t != chosen)
        probabilities_V = torch.zeros_like(final_V).index_fill(0, torch.tensor([chosen]), 1.0)
    return SamplingExplanation(
        removed, probabilities_V.numpy(), final_V.log_softmax(0).numpy(), logits_V.log_softmax(0).numpy()
    )


@dataclass(frozen=True, slots=True)
class _History:
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    eos: tuple[int, ...]


def _processed(logits_V: torch.Tensor, params: SamplingParams, history: _History) -> torch.Tensor:
    """The sampler on a batch of this one row."""
    eos = () if params.ignore_eos else history.eos
    request = Request(
        "explained",
        list(history.prompt),
        params,
        0,
        0,
        (0,),
        stop_ids=frozenset((*eos, *params.stop_token_ids)),
        max_tokens=len(history.prompt) + params.max_tokens,
    )
    sequence = request.sequences[0]
    sequence.token_ids += history.output
    sequence.row = 0
    table = SamplingTable(1)
    table.set(sequence)
    return process(logits_V[None], table.batch([sequence]))[0]
