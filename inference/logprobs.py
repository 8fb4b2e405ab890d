"""Log-probabilities, always float32: of drawn tokens, of the likeliest ones, of given tokens.

Suffixes: R rows, V vocabulary, K likeliest tokens.
"""

import torch


def log_sum_exp(logits_RV: torch.Tensor) -> torch.Tensor:
    """[R]; NaN or infinite exactly where a row is no distribution."""
    return torch.logsumexp(logits_RV, dim=-1)


def token_logprobs(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
    """[R] log-softmax of each row at its token."""
    return logits_RV.gather(1, token_ids_R[:, None])[:, 0] - log_sum_exp(logits_RV)


def likeliest(logits_V: torch.Tensor, lse: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest ids and their logprobs, best first."""
    values_K, ids_K = logits_V.topk(min(k, len(logits_V)))
    return ids_K, values_K - lse
