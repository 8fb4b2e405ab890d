"""Grouped attention equals one dense block-diagonal mask, forward and backward."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from learner import attention
from learner.attention import DocumentLayout, document_attention, window_mask
from olmorl.contract.errors import ModelError

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8


def layout_of(lengths: list[int]) -> DocumentLayout:
    return DocumentLayout.from_starts(np.concatenate([[0], np.cumsum(lengths)]), device=CPU)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """The twin: one call, one mask over all tokens."""
    blocks = torch.block_diag(*(window_mask(n, window, device=CPU).float() for n in lengths)).bool()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=blocks, scale=0.3, enable_gqa=True)
    return out.transpose(1, 2)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=14), st.sampled_from([None, 1, 5, 100]), st.booleans())
def test_equals_the_dense_mask(lengths: list[int], window: int | None, small_groups: bool) -> None:
    torch.manual_seed(len(lengths))
    total = sum(lengths)
    tensors = [torch.randn(1, heads, total, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    weights = torch.randn(1, total, HEADS, DIM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SMALLEST_GROUP_TOKENS", 1 if small_groups else 256)
        layout = layout_of(lengths)
    out, _ = document_attention(nn.Identity(), *tensors, None, scaling=0.3, sliding_window=window, layout=layout)
    grads = torch.autograd.grad((out * weights).sum(), tensors)
    twin = dense_attention(*tensors, lengths, window)
    twin_grads = torch.autograd.grad((twin * weights).sum(), tensors)

    torch.testing.assert_close(out, twin, rtol=1e-5, atol=1e-5)
    for grad, twin_grad in zip(grads, twin_grads, strict=True):
        torch.testing.assert_close(grad, twin_grad, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_every_token_has_its_own_slot_and_padding_is_bounded(lengths: list[int]) -> None:
    layout = layout_of(lengths)
    assert len(set(layout.slots_N.tolist())) == sum(lengths)
    assert int(layout.slots_N.max()) < layout.num_padded
    slack = len(layout.groups) * attention.SMALLEST_GROUP_TOKENS
    assert layout.num_padded <= sum(lengths) / attention.SHORTEST_SHARE + slack


def test_many_short_documents_make_few_groups() -> None:
    lengths = np.random.default_rng(0).integers(20, 90, 400).tolist()
    assert len(layout_of(lengths).groups) <= 12


def test_unknown_attention_is_refused() -> None:
    q = torch.randn(1, 2, 3, DIM)
    with pytest.raises(ModelError, match="softcap"):
        document_attention(nn.Identity(), q, q, q, None, softcap=30.0, layout=layout_of([3]))
