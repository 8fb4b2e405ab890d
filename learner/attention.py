"""Causal attention inside each document of a packed micro-batch, in few calls.

A dense block-diagonal mask costs N² for N tokens; one call a document costs hundreds of calls a layer when documents
are short. So documents of like length share one padded call. Padding stands behind each document, where a causal mask
hides it from every real token, and it is dropped on the way out.

A GPU in half precision needs none of that: one flash kernel takes documents of any lengths.

Shapes: N tokens of the micro-batch, X places in which each child stands behind a copy of its parent, P the same with
padding, B documents of a group, L their padded length, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from olmorl.contract.errors import ModelError

ATTENTION_NAME = "olmorl_documents"
SHORTEST_SHARE = 0.85  # of the longest document in its group; below it padding costs more than another call
SMALLEST_GROUP_TOKENS = 256  # a group of fewer tokens costs less than the calls that a finer grouping adds


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """Where each token of a micro-batch goes in the padded groups. Computed once, used by every layer.

    A child is laid behind a copy of its parent: the copy costs attention, and nothing of all else that a layer does.
    """

    tokens_P: Tensor
    """the token at each padded place; in the padding any"""
    slots_N: Tensor
    """a padded place of each token"""
    groups: tuple[tuple[int, int], ...]  # (documents, padded length), one behind the other in P
    spans: tuple[tuple[int, int], ...]
    """(tokens of the parent, own tokens) of each document"""
    chain_tokens_X: Tensor
    """the same without padding: the token at each place, for the flash kernel"""
    chain_slots_N: Tensor
    chain_starts: Tensor  # int32, cumulative
    longest: int

    @classmethod
    def from_starts(
        cls, document_starts: np.ndarray, *, device: torch.device, parents: np.ndarray | None = None
    ) -> "DocumentLayout":
        starts = document_starts.astype(np.int64)
        if parents is None:
            parents = np.full(len(starts) - 1, -1)
        ranges = [np.arange(begin, end) for begin, end in pairwise(starts)]
        spans = tuple((len(ranges[p]) if p >= 0 else 0, len(own)) for p, own in zip(parents, ranges, strict=True))
        read_by_others = set(parents.tolist())
        chains = [
            own if parent < 0 else np.concatenate([ranges[parent], own])
            for index, (parent, own) in enumerate(zip(parents, ranges, strict=True))
            if index not in read_by_others
        ]
        chains.sort(key=len, reverse=True)
        groups = _group([len(chain) for chain in chains])
        tokens = np.zeros(sum(count * length for count, length in groups), np.int64)
        slots, chain_slots = np.empty(int(starts[-1]), np.int64), np.empty(int(starts[-1]), np.int64)
        begin, chain_begin = 0, 0
        padded_lengths = [length for count, length in groups for _ in range(count)]
        for chain, padded in zip(chains, padded_lengths, strict=True):
            tokens[begin : begin + len(chain)] = chain
            slots[chain] = begin + np.arange(len(chain))
            chain_slots[chain] = chain_begin + np.arange(len(chain))
            begin, chain_begin = begin + padded, chain_begin + len(chain)

        def send(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            tokens_P=send(tokens),
            slots_N=send(slots),
            groups=groups,
            spans=spans,
            chain_tokens_X=send(np.concatenate(chains)),
            chain_slots_N=send(chain_slots),
            chain_starts=send(np.cumsum([0, *map(len, chains)]).astype(np.int32)),
            longest=len(chains[0]),
        )


def _group(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    """(documents, padded length) of each group, of lengths that never rise."""
    groups: list[tuple[int, int]] = []
    first = 0
    while first < len(lengths):
        longest, last = lengths[first], first
        while last < len(lengths) and (
            lengths[last] >= longest * SHORTEST_SHARE or (last - first) * longest < SMALLEST_GROUP_TOKENS
        ):
            last += 1
        groups.append((last - first, longest))
        first = last
    return tuple(groups)


class _Spread(torch.autograd.Function):
    """[N, ...] to [P, ...]. In the padding stands any token: nobody looks at it, so nothing flows back from there."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, tokens_P: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_P)
        ctx.num_tokens = x_N.shape[0]
        return x_N.index_select(0, tokens_P)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (tokens_P,) = ctx.saved_tensors
        grad_P = grads[0].float()  # the copies of a long prompt are many: their sum wants more than half precision
        grad_N = grad_P.new_zeros((ctx.num_tokens, *grad_P.shape[1:])).index_add_(0, tokens_P, grad_P)
        return grad_N.to(grads[0].dtype), None


class _Gather(torch.autograd.Function):
    """[P, ...] to [N, ...]. Each token is read at one place: all others, padding among them, get no gradient."""

    @staticmethod
    def forward(ctx: Any, x_P: Tensor, slots_N: Tensor) -> Tensor:
        ctx.save_for_backward(slots_N)
        ctx.num_places = x_P.shape[0]
        return x_P.index_select(0, slots_N)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (slots_N,) = ctx.saved_tensors
        return grads[0].new_zeros((ctx.num_places, *grads[0].shape[1:])).index_copy_(0, slots_N, grads[0]), None


@torch.compiler.disable
def document_attention(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | int | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: DocumentLayout,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention; returns [1, N, H, D].

    Some families say their window here, all say it where they ask for a mask.
    """
    assert not isinstance(attention_mask, Tensor), "document attention masks by itself"
    window = attention_mask if sliding_window is None else sliding_window
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if rest.get(name) is not None]
    if unsupported:
        raise ModelError(f"the model's attention wants {', '.join(unsupported)}, which the learner does not support")
    if query_1HND.is_cuda and query_1HND.dtype in (torch.float16, torch.bfloat16):
        q_XHD, k_XKD, v_XKD = (
            _Spread.apply(x[0].transpose(0, 1), layout.chain_tokens_X) for x in (query_1HND, key_1KND, value_1KND)
        )
        out_XHD = _flash_attention(q_XHD, k_XKD, v_XKD, layout, scaling=scaling, window=window)
        return _Gather.apply(out_XHD, layout.chain_slots_N)[None], None
    q_PHD, k_PKD, v_PKD = (
        _Spread.apply(x[0].transpose(0, 1), layout.tokens_P) for x in (query_1HND, key_1KND, value_1KND)
    )
    outputs = []
    offset = 0
    for documents, length in layout.groups:
        rows = slice(offset, offset + documents * length)
        q_BHLD, k_BKLD, v_BKLD = (
            x[rows].unflatten(0, (documents, length)).transpose(1, 2) for x in (q_PHD, k_PKD, v_PKD)
        )
        windowed = window is not None and window < length
        out_BHLD = F.scaled_dot_product_attention(
            q_BHLD,
            k_BKLD,
            v_BKLD,
            attn_mask=window_mask(length, window, device=q_PHD.device) if windowed else None,
            is_causal=not windowed,
            scale=scaling,
            enable_gqa=q_PHD.shape[1] != k_PKD.shape[1],
        )
        outputs.append(out_BHLD.transpose(1, 2).flatten(0, 1))
        offset = rows.stop
    return _Gather.apply(torch.cat(outputs), layout.slots_N)[None], None


def _flash_attention(
    q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, layout: DocumentLayout, *, scaling: float | None, window: int | None
) -> Tensor:
    """[X, H, D]; no padding, one kernel. A window counts the query itself, the kernel's counts what lies before it."""
    out_XHD = varlen_attn(
        q_XHD,
        k_XKD,
        v_XKD,
        layout.chain_starts,
        layout.chain_starts,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_XHD.shape[1] != k_XKD.shape[1],
    )
    assert isinstance(out_XHD, Tensor), "without return_aux there is one result"
    return out_XHD


def window_mask(length: int, window: int | None, *, device: torch.device) -> Tensor:
    """[L, L], True where a query may look: at itself and at most `window` - 1 tokens before."""
    position = torch.arange(length, device=device)
    distance_LL = position[:, None] - position[None, :]
    allowed_LL = distance_LL >= 0
    return allowed_LL if window is None else allowed_LL & (distance_LL < window)


def mask_window(*, local_size: int | None = None, use_vmap: bool = False, **rest: Any) -> int | None:
    """What transformers calls in place of making a mask: all that document attention wants of one is the window.

    `use_vmap` says that a model joins a mask of its own to the causal one.
    """
    if use_vmap:
        raise ModelError("the model masks its attention in a way of its own, which the learner does not support")
    return local_size


def register() -> None:
    """Make both known to transformers under ATTENTION_NAME; harmless when done twice."""
    AttentionInterface.register(ATTENTION_NAME, document_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_window)
