"""What a training step says about its tokens, summed over micro-batches and ranks.

Ratio statistics are taken before the cap: after it everything looks well. Mismatch counts only tokens drawn by the very
version that is trained, so that it shows kernels that differ, and never drift of the policy.

Shapes: R trained tokens of a micro-batch.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from learner.loss import PolicyLoss

SUMS = ("loss", "tokens", "clipped", "importance", "capped", "entropy", "lag", "same", "same_abs_diff", "same_kl")
MAXIMA = ("importance", "lag", "same_abs_diff")


class TokenTotals:
    def __init__(self, *, device: torch.device) -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)

    def add(
        self,
        loss: PolicyLoss,
        *,
        logprobs_R: Tensor,
        behaviour_logprobs_R: Tensor,
        entropy_R: Tensor,
        lag_R: Tensor,
        importance_cap: float,
    ) -> None:
        if len(lag_R) == 0:
            return
        same_R = lag_R == 0
        log_ratio_R = (logprobs_R - behaviour_logprobs_R)[same_R]  # learner over engine
        diff_R = log_ratio_R.abs()
        sums = (
            loss.loss_R.detach().sum(),
            torch.tensor(len(lag_R)),
            loss.clipped_R.sum(),
            loss.importance_R.sum(),
            (loss.importance_R > importance_cap).sum(),
            entropy_R.sum(),
            lag_R.sum(),
            same_R.sum(),
            diff_R.sum(),
            (log_ratio_R.expm1() - log_ratio_R).sum(),  # the estimator of KL(engine, learner) that is never negative
        )
        self._sums += torch.stack([x.to(self._sums) for x in sums])
        largest_diff = diff_R.max() if len(diff_R) else torch.tensor(-torch.inf)
        maxima = (loss.importance_R.max(), lag_R.max(), largest_diff)
        self._maxima = torch.maximum(self._maxima, torch.stack([x.to(self._maxima) for x in maxima]))

    def reduce(self) -> None:
        """Sum and maximise over all ranks; collective."""
        dist.all_reduce(self._sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)

    def metrics(self, *, num_loss_tokens: int) -> dict[str, float]:
        """By the names of the run's metrics; those that no token speaks for are absent."""
        total = dict(zip(SUMS, self._sums.tolist(), strict=True))
        largest = dict(zip(MAXIMA, self._maxima.tolist(), strict=True))
        tokens, same = total["tokens"], total["same"]
        if tokens == 0:
            return {}
        metrics = {
            "loss/policy": total["loss"] / num_loss_tokens,
            "loss/clip_fraction": total["clipped"] / tokens,
            "off_policy/importance_ratio_mean": total["importance"] / tokens,
            "off_policy/importance_ratio_max": largest["importance"],
            "off_policy/capped_fraction": total["capped"] / tokens,
            "off_policy/version_lag_mean": total["lag"] / tokens,
            "off_policy/version_lag_max": largest["lag"],
            "rollout/entropy": total["entropy"] / tokens,
        }
        if same:
            metrics |= {
                "mismatch/logprob_abs_diff_mean": total["same_abs_diff"] / same,
                "mismatch/logprob_abs_diff_max": largest["same_abs_diff"],
                "mismatch/kl": total["same_kl"] / same,
            }
        return metrics
