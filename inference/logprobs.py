"""Log-probabilities, always float32: of drawn tokens, of the likeliest ones, of given tokens.

Suffixes: R rows, V vocabulary.
"""

import torch


def log_sum_exp(logits_RV: torch.Tensor) -> torch.Tensor:
    """[R]; NaN or infinite exactly where a row is no distribution."""
    return torch.logsumexp(logits_RV, dim=-1)


def token_logprobs(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
    """[R] log-softmax of each row at its token."""
    return logits_RV.gather(1, token_ids_R[:, None])[:, 0] - log_sum_exp(logits_RV)


def top_logprobs(
    logits_RV: torch.Tensor, lse_R: torch.Tensor, wanted: list[tuple[int, int]]
) -> dict[int, list[tuple[int, float]]]:
    """For each (row, k): the k likeliest ids with their logprobs, best first."""
    top: dict[int, list[tuple[int, float]]] = {}
    for row, k in wanted:
        values, ids = logits_RV[row].topk(min(k, logits_RV.shape[1]))
        top[row] = list(zip(ids.tolist(), (values - lse_R[row]).tolist(), strict=True))
    return top
