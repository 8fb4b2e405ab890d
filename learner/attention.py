"""Causal attention inside each document of a packed micro-batch, in few calls.

A dense block-diagonal mask costs N² for N tokens; one call a document costs hundreds of calls a layer when documents
are short. So documents of like length share one padded call. Padding stands behind each document, where a causal mask
hides it from every real token, and it is dropped on the way out.

A GPU in half precision needs none of that: one flash kernel takes documents of any lengths.

Shapes: N tokens of the micro-batch, P tokens with padding, B documents of a group, L their padded length,
H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from olmorl.contract.errors import ModelError

ATTENTION_NAME = "olmorl_documents"
SHORTEST_SHARE = 0.85  # of the longest document in its group; below it padding costs more than another call
SMALLEST_GROUP_TOKENS = 256  # a group of fewer tokens costs less than the calls that a finer grouping adds


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """Where each token of a micro-batch goes in the padded groups. Computed once, used by every layer."""

    slots_N: Tensor
    groups: tuple[tuple[int, int], ...]  # (documents, padded length), one behind the other in P
    lengths: tuple[int, ...]
    starts: Tensor  # int32, cumulative lengths, what the flash kernel reads

    @property
    def num_padded(self) -> int:
        return sum(documents * length for documents, length in self.groups)

    @classmethod
    def from_starts(cls, document_starts: np.ndarray, *, device: torch.device) -> "DocumentLayout":
        lengths = np.diff(document_starts).astype(np.int64)
        order = np.argsort(-lengths, kind="stable")
        slots = np.empty(int(document_starts[-1]), np.int64)
        groups: list[tuple[int, int]] = []
        first, offset = 0, 0
        while first < len(order):
            longest = int(lengths[order[first]])
            last = first
            while last < len(order) and (
                lengths[order[last]] >= longest * SHORTEST_SHARE or (last - first) * longest < SMALLEST_GROUP_TOKENS
            ):
                document = order[last]
                start, length = document_starts[document], lengths[document]
                slots[start : start + length] = offset + np.arange(length)
                offset += longest
                last += 1
            groups.append((last - first, longest))
            first = last
        starts = torch.from_numpy(document_starts.astype(np.int32)).to(device)
        return cls(torch.from_numpy(slots).to(device), tuple(groups), tuple(int(n) for n in lengths), starts)


class _Pad(torch.autograd.Function):
    """[N, ...] to [P, ...], zeros in the padding. Each token has one slot, so no gradient is ever summed."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, slots_N: Tensor, num_padded: int) -> Tensor:
        ctx.save_for_backward(slots_N)
        return x_N.new_zeros((num_padded, *x_N.shape[1:])).index_copy_(0, slots_N, x_N)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (slots_N,) = ctx.saved_tensors
        return grads[0].index_select(0, slots_N), None, None


class _Unpad(torch.autograd.Function):
    """[P, ...] to [N, ...]. The gradient of padding is zero: it must not flow into the keys it looked at."""

    @staticmethod
    def forward(ctx: Any, x_P: Tensor, slots_N: Tensor) -> Tensor:
        ctx.save_for_backward(slots_N)
        ctx.num_padded = x_P.shape[0]
        return x_P.index_select(0, slots_N)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (slots_N,) = ctx.saved_tensors
        grad_N = grads[0]
        return grad_N.new_zeros((ctx.num_padded, *grad_N.shape[1:])).index_copy_(0, slots_N, grad_N), None


def document_attention(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: DocumentLayout,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention; returns [1, N, H, D]."""
    assert attention_mask is None, "document attention masks by itself"
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if rest.get(name) is not None]
    if unsupported:
        raise ModelError(f"the model's attention wants {', '.join(unsupported)}, which the learner does not support")
    if query_1HND.is_cuda and query_1HND.dtype in (torch.float16, torch.bfloat16):
        q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query_1HND, key_1KND, value_1KND))
        return _flash_attention(q_NHD, k_NKD, v_NKD, layout, scaling=scaling, window=sliding_window)[None], None
    q_PHD, k_PKD, v_PKD = (
        _Pad.apply(x[0].transpose(0, 1), layout.slots_N, layout.num_padded) for x in (query_1HND, key_1KND, value_1KND)
    )
    outputs = []
    offset = 0
    for documents, length in layout.groups:
        rows = slice(offset, offset + documents * length)
        q_BHLD, k_BKLD, v_BKLD = (
            x[rows].unflatten(0, (documents, length)).transpose(1, 2) for x in (q_PHD, k_PKD, v_PKD)
        )
        windowed = sliding_window is not None and sliding_window < length
        out_BHLD = F.scaled_dot_product_attention(
            q_BHLD,
            k_BKLD,
            v_BKLD,
            attn_mask=window_mask(length, sliding_window, device=q_PHD.device) if windowed else None,
            is_causal=not windowed,
            scale=scaling,
            enable_gqa=q_PHD.shape[1] != k_PKD.shape[1],
        )
        outputs.append(out_BHLD.transpose(1, 2).flatten(0, 1))
        offset = rows.stop
    return _Unpad.apply(torch.cat(outputs), layout.slots_N)[None], None


def _flash_attention(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layout: DocumentLayout, *, scaling: float | None, window: int | None
) -> Tensor:
    """[N, H, D]; no padding, one kernel. A window counts the query itself, the kernel's counts what lies before it."""
    longest = max(layout.lengths)
    out_NHD = varlen_attn(
        q_NHD.contiguous(),
        k_NKD.contiguous(),
        v_NKD.contiguous(),
        layout.starts,
        layout.starts,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_NHD.shape[1] != k_NKD.shape[1],
    )
    assert isinstance(out_NHD, Tensor), "without return_aux there is one result"
    return out_NHD


def window_mask(length: int, window: int | None, *, device: torch.device) -> Tensor:
    """[L, L], True where a query may look: at itself and at most `window` - 1 tokens before."""
    position = torch.arange(length, device=device)
    distance_LL = position[:, None] - position[None, :]
    allowed_LL = distance_LL >= 0
    return allowed_LL if window is None else allowed_LL & (distance_LL < window)


def register() -> None:
    """Make `document_attention` known to transformers under ATTENTION_NAME; harmless when done twice."""
    AttentionInterface.register(ATTENTION_NAME, document_attention)
