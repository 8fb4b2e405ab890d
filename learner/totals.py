"""What a training step says about its tokens, summed over micro-batches, optimizer steps and ranks.

The importance ratio is shown before the cap, since after it everything looks well, and after it, since that is what
trains. Mismatch counts only tokens drawn by the very version that is trained, so that it shows kernels that differ, and
never drift of the policy; `age/<n>` shows both, for tokens n versions old.

Shapes: R trained tokens of a micro-batch, A ages.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from learner.loss import PolicyLoss, TokenBatch, kl_estimate

SUMS: tuple[str, ...] = ("loss", "tokens", "clipped", "importance", "rho", "capped", "banned", "kl", "entropy", "lag")
SUMS += ("same", "same_abs_diff", "same_kl")
MAXIMA = ("importance", "lag", "same_abs_diff")
AGE_SUMS = ("tokens", "loss", "abs_diff")
OLDEST = 16  # the last age stands for all beyond it


class TokenTotals:
    def __init__(self, *, device: torch.device) -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
        self._ages_A = torch.zeros(OLDEST + 1, len(AGE_SUMS), dtype=torch.float64, device=device)

    def add(
        self, loss: PolicyLoss, tokens: TokenBatch, *, entropy_R: Tensor, lag_R: Tensor, importance_cap: float
    ) -> None:
        if len(lag_R) == 0:
            return
        loss_R = loss.loss_R.detach()
        log_ratio_R = tokens.old_logprobs_R - tokens.behaviour_logprobs_R  # learner over engine
        diff_R = log_ratio_R.abs()
        same_R = lag_R == 0
        same_diff_R, same_ratio_R = diff_R[same_R], log_ratio_R[same_R]
        sums = (
            loss_R.sum(),
            torch.tensor(len(lag_R)),
            loss.clipped_R.sum(),
            loss.importance_R.sum(),
            loss.rho_R.sum(),
            (loss.importance_R > importance_cap).sum(),
            (loss.rho_R == 0).sum(),
            torch.tensor(0.0) if loss.kl_R is None else loss.kl_R.sum(),
            entropy_R.sum(),
            lag_R.sum(),
            same_R.sum(),
            same_diff_R.sum(),
            kl_estimate(-same_ratio_R, "k3").sum(),  # of KL(engine, learner)
        )
        self._sums += torch.stack([x.to(self._sums) for x in sums])
        largest_diff = same_diff_R.max() if len(same_diff_R) else torch.tensor(-torch.inf)
        maxima = (loss.importance_R.max(), lag_R.max(), largest_diff)
        self._maxima = torch.maximum(self._maxima, torch.stack([x.to(self._maxima) for x in maxima]))
        by_age = torch.stack([torch.ones_like(loss_R), loss_R, diff_R], dim=1)
        self._ages_A.index_add_(0, lag_R.long().clamp(0, OLDEST), by_age.to(self._ages_A))

    def reduce(self) -> None:
        """Sum and maximise over all ranks; collective."""
        dist.all_reduce(self._sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(self._ages_A, op=dist.ReduceOp.SUM)
        dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)

    def metrics(self, *, denominator: float) -> dict[str, float]:
        """By the names of the run's metrics; those that no token speaks for are absent."""
        total = dict(zip(SUMS, self._sums.tolist(), strict=True))
        largest = dict(zip(MAXIMA, self._maxima.tolist(), strict=True))
        tokens, same = total["tokens"], total["same"]
        if tokens == 0:
            return {}
        metrics = {
            "loss/policy": total["loss"] / denominator,
            "loss/kl": total["kl"] / tokens,
            "loss/clip_fraction": total["clipped"] / tokens,
            "off_policy/importance_ratio_mean": total["importance"] / tokens,
            "off_policy/importance_ratio_max": largest["importance"],
            "off_policy/importance_weight_mean": total["rho"] / tokens,
            "off_policy/capped_fraction": total["capped"] / tokens,
            "off_policy/banned_fraction": total["banned"] / tokens,
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
        return metrics | self._by_age(tokens)

    def _by_age(self, tokens: float) -> dict[str, float]:
        metrics = {}
        for age, (count, loss, abs_diff) in enumerate(self._ages_A.tolist()):
            if count:
                metrics[f"age/{age}/token_share"] = count / tokens
                metrics[f"age/{age}/loss"] = loss / count
                metrics[f"age/{age}/mismatch"] = abs_diff / count
        return metrics
