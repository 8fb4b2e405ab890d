"""Logprobs and entropies from hidden states, without the [tokens, vocabulary] logits ever standing whole.

The backward computes the logits of each chunk anew: one more product per chunk instead of R x V floats of memory.

Shapes: R rows to be scored, C rows of a chunk, E width of the model, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_ROWS = 4096  # widened at once, where no product sums half precision in float32


def chunked_logprobs(
    hidden_RE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """(logprob of each target, entropy of each row), float32, of softmax(logits / temperature).

    The entropy is a measurement: no gradient flows through it.
    """
    logprobs_R, entropy_R = _ChunkedLogprobs.apply(hidden_RE, weight_VE, bias_V, targets_R, temperature, chunk_tokens)
    return logprobs_R, entropy_R


def full_logprobs(
    hidden_RE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, targets_R: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The plain twin of `chunked_logprobs`: all logits at once, gradients by autograd."""
    logprobs_RV = F.log_softmax(_logits(hidden_RE, weight_VE, bias_V, temperature), dim=-1)
    entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(-1)
    return logprobs_RV.gather(-1, targets_R[:, None])[:, 0], entropy_R.detach()


def _logits(hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """Summed in float32 and never rounded to the compute dtype, like the engine's."""
    if weight_VE.dtype == torch.float32:
        logits_CV = F.linear(hidden_CE, weight_VE)
    elif weight_VE.is_cuda:
        logits_CV = torch.mm(hidden_CE, weight_VE.T, out_dtype=torch.float32)
    else:
        parts = [hidden_CE.float() @ part_VE.float().T for part_VE in weight_VE.split(HEAD_ROWS)]
        logits_CV = torch.cat(parts, dim=1)
    if bias_V is not None:
        logits_CV = logits_CV + bias_V
    return logits_CV if temperature == 1 else logits_CV / temperature


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_R, entropy_R, lse_R = (
            torch.empty(len(targets_R), dtype=torch.float32, device=hidden_RE.device) for _ in range(3)
        )
        for begin in range(0, len(targets_R), chunk_tokens):
            rows = slice(begin, begin + chunk_tokens)
            logits_CV = _logits(hidden_RE[rows], weight_VE, bias_V, temperature)
            lse_C = logits_CV.logsumexp(-1)
            lse_R[rows] = lse_C
            log_p_CV = logits_CV.sub_(lse_C[:, None])
            logprobs_R[rows] = log_p_CV.gather(-1, targets_R[rows, None])[:, 0]
            entropy_R[rows] = -torch.linalg.vecdot(log_p_CV.exp(), log_p_CV)
        ctx.save_for_backward(hidden_RE, weight_VE, bias_V, targets_R, lse_R)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_R)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        hidden_RE, weight_VE, bias_V, targets_R, lse_R = ctx.saved_tensors
        grad_R = grads[0] / ctx.temperature
        dhidden_RE = torch.empty_like(hidden_RE)
        dweight_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        dbias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for begin in range(0, len(targets_R), ctx.chunk_tokens):
            rows = slice(begin, begin + ctx.chunk_tokens)
            d_CV = _logits(hidden_RE[rows], weight_VE, bias_V, ctx.temperature)
            d_CV.sub_(lse_R[rows, None]).exp_().mul_(-grad_R[rows, None])  # minus the softmax ...
            d_CV.scatter_add_(1, targets_R[rows, None], grad_R[rows, None])  # ... plus one at the target
            if dbias_V is not None:
                dbias_V += d_CV.sum(0)
            d_CV = d_CV.to(weight_VE.dtype)
            dhidden_RE[rows] = d_CV @ weight_VE
            dweight_VE += d_CV.T @ hidden_RE[rows]
        dbias = None if dbias_V is None else dbias_V.to(weight_VE.dtype)
        return dhidden_RE, dweight_VE.to(weight_VE.dtype), dbias, None, None, None
