"""Log-probabilities, always float32: of drawn tokens, of the likeliest ones, of given tokens.

Suffixes: R rows, V vocabulary, K likeliest tokens.
"""

import torch


def log_sum_exp(logits_RV: torch.Tensor) -> torch.Tensor:
    """[R]; NaN or infinite exactly where a row is no distribution. On a CPU a row's is what it is alone, bitwise."""
    if logits_RV.device.type != "cpu":
        return torch.logsumexp(logits_RV, dim=-1)
    lse_R = logits_RV.new_empty(len(logits_RV))
    for row, logits_V in enumerate(logits_RV):  # together they would be summed in an order that hangs on their number
        lse_R[row] = torch.logsumexp(logits_V.contiguous(), dim=0)
    return lse_R


def token_logprobs(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
    """[R] log-softmax of each row at its token."""
    return logits_RV.gather(1, token_ids_R[:, None])[:, 0] - log_sum_exp(logits_RV)


def likeliest(logits_V: torch.Tensor, lse: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest ids and their logprobs, best first."""
    values_K, ids_K = logits_V.topk(min(k, len(logits_V)))
    return ids_K, values_K - lse
