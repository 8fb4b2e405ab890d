"""Chunked logprobs equal those of the whole logits, with their gradients."""

import pytest
import torch

from learner.logprobs import chunked_logprobs, full_logprobs


@pytest.mark.parametrize("chunk", [1, 7, 20, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_full_logits(chunk: int, temperature: float, with_bias: bool) -> None:
    torch.manual_seed(0)
    hidden_RE = torch.randn(20, 16, requires_grad=True)
    weight_VE = torch.randn(37, 16, requires_grad=True)
    bias_V = torch.randn(37, requires_grad=True) if with_bias else None
    targets_R = torch.randint(37, (20,))
    leaves = [x for x in (hidden_RE, weight_VE, bias_V) if x is not None]
    weights = torch.randn(20)

    ours = chunked_logprobs(hidden_RE, weight_VE, bias_V, targets_R, temperature=temperature, chunk_tokens=chunk)
    twin = full_logprobs(hidden_RE, weight_VE, bias_V, targets_R, temperature=temperature)
    torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((ours[0] * weights).sum(), leaves)
    twin_grads = torch.autograd.grad((twin[0] * weights).sum(), leaves)
    torch.testing.assert_close(grads, twin_grads, rtol=1e-4, atol=1e-5)


def test_temperature_divides_logits() -> None:
    """The table of numerics: logits [2, 1, 0], token 0."""
    hidden_RE, weight_VE = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]])
    for temperature, expected in ((1.0, -0.4076), (0.5, -0.1429)):
        logprobs_R, _ = chunked_logprobs(hidden_RE, weight_VE, None, torch.tensor([0]), temperature=temperature)
        assert logprobs_R.item() == pytest.approx(expected, abs=1e-4)


def test_no_row_at_all() -> None:
    hidden_RE, weight_VE = torch.zeros(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    logprobs_R, entropy_R = chunked_logprobs(hidden_RE, weight_VE, None, torch.zeros(0, dtype=torch.int64))
    logprobs_R.sum().backward()
    assert len(entropy_R) == 0 and not weight_VE.grad.any()


def test_logits_of_bfloat16_are_never_rounded_to_it() -> None:
    """Rounded they would be off by some 0.05 at a logit of 16: more than engine and learner may differ by."""
    torch.manual_seed(0)
    hidden_RE, weight_VE = 4 * torch.randn(64, 32).bfloat16(), torch.randn(500, 32).bfloat16()
    bias_V, targets_R = torch.randn(500).bfloat16(), torch.randint(500, (64,))
    logprobs_R, _ = chunked_logprobs(hidden_RE, weight_VE, bias_V, targets_R, chunk_tokens=9)
    exact_R, _ = full_logprobs(hidden_RE.double(), weight_VE.double(), bias_V.double(), targets_R)
    assert logprobs_R.dtype == torch.float32
    torch.testing.assert_close(logprobs_R, exact_R.float(), rtol=1e-4, atol=1e-4)
