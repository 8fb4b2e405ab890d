"""Grouped attention equals one dense block-diagonal mask, forward and backward."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from learner import attention
from learner.attention import DocumentLayout, document_attention
from olmorl.contract.errors import ModelError

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8


def layout_of(lengths: list[int], parents: list[int] | None = None) -> DocumentLayout:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return DocumentLayout.from_starts(starts, device=CPU, parents=None if parents is None else np.array(parents))


def dense_mask(lengths: list[int], parents: list[int], window: int | None) -> Tensor:
    """The twin: one mask over all tokens, entry by entry."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    before = [lengths[p] if p >= 0 else 0 for p in parents]
    position = np.concatenate([before[d] + np.arange(n) for d, n in enumerate(lengths)])
    total = sum(lengths)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for q in range(total):
        for k in range(total):
            related = document[k] in (document[q], parents[document[q]])
            distance = position[q] - position[k]
            mask[q, k] = bool(related and distance >= 0 and (window is None or distance < window))
    return mask


families = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), max_size=4)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(families, st.sampled_from([None, 1, 5, 100]), st.booleans())
def test_equals_the_dense_mask(shape: list, window: int | None, small_groups: bool) -> None:
    """Documents alone, and parents with children."""
    lengths, parents = [], []
    for own, children in shape:
        parents += [-1] + [len(lengths)] * len(children)
        lengths += [own, *children]
    torch.manual_seed(len(lengths))
    total = sum(lengths)
    tensors = [torch.randn(1, heads, total, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    weights = torch.randn(1, total, HEADS, DIM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SMALLEST_GROUP_TOKENS", 1 if small_groups else 256)
        layout = layout_of(lengths, parents)
    out, _ = document_attention(nn.Identity(), *tensors, None, scaling=0.3, sliding_window=window, layout=layout)
    grads = torch.autograd.grad((out * weights).sum(), tensors)
    mask = dense_mask(lengths, parents, window)
    twin = F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    twin_grads = torch.autograd.grad((twin * weights).sum(), tensors)

    torch.testing.assert_close(out, twin, rtol=1e-5, atol=1e-5)
    for grad, twin_grad in zip(grads, twin_grads, strict=True):
        torch.testing.assert_close(grad, twin_grad, rtol=1e-4, atol=1e-5)
    chains = layout.chain_tokens_X.tolist()
    assert [chains[slot] for slot in layout.chain_slots_N.tolist()] == list(range(total))
    assert layout.chain_starts[-1] == len(chains) and layout.longest == max(np.diff(layout.chain_starts.numpy()))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_every_token_has_its_own_slot_and_padding_is_bounded(lengths: list[int]) -> None:
    layout = layout_of(lengths)
    assert layout.tokens_P[layout.slots_N].tolist() == list(range(sum(lengths)))
    slack = len(layout.groups) * attention.SMALLEST_GROUP_TOKENS
    assert len(layout.tokens_P) <= sum(lengths) / attention.SHORTEST_SHARE + slack


def test_many_short_documents_make_few_groups() -> None:
    lengths = np.random.default_rng(0).integers(20, 90, 400).tolist()
    assert len(layout_of(lengths).groups) <= 12


def test_unknown_attention_is_refused() -> None:
    q = torch.randn(1, 2, 3, DIM)
    with pytest.raises(ModelError, match="softcap"):
        document_attention(nn.Identity(), q, q, q, None, softcap=30.0, layout=layout_of([3]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the flash kernel is there only on a GPU")
@pytest.mark.parametrize("window", [None, 5])
def test_the_flash_kernel_equals_the_groups(window: int | None) -> None:
    gpu = torch.device("cuda")
    starts, parents = np.array([0, 9, 20, 23, 64]), np.array([-1, 0, 0, -1])
    layout = DocumentLayout.from_starts(starts, device=gpu, parents=parents)
    exact = [torch.randn(1, heads, 64, 64, device=gpu, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    half = [x.detach().bfloat16().requires_grad_(True) for x in exact]
    results = [
        document_attention(nn.Identity(), *x, None, scaling=0.1, sliding_window=window, layout=layout)[0]
        for x in (exact, half)
    ]
    weights = torch.randn_like(results[0])
    for result in results:
        (result.float() * weights).sum().backward()
    torch.testing.assert_close(results[1].float(), results[0], rtol=2e-2, atol=2e-2)
    for a, b in zip(half, exact, strict=True):
        torch.testing.assert_close(a.grad.float(), b.grad, rtol=5e-2, atol=5e-2)
