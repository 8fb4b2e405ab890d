"""The objective, as a pure function on tensors. By default OLMo 3's GRPO; as a diff from GRPO:

* the sum over tokens is divided by the number of trained tokens of the whole global batch, not per sample, per rank or
  per micro-batch, so that every token weighs the same however the batch is cut;
* the clip is asymmetric (clip-higher): the ratio may rise further than it may fall;
* no KL term, and no division of the advantage by the group's standard deviation (the driver computes advantages);
* a truncated importance weight corrects for tokens drawn by an engine that was not the learner before this update
  (older weights, other kernels): rho = min(pi_old / pi_inf, cap), a constant to the gradient.

Switches, each as a diff from that:

* `objective = "gspo"`: in place of each token's ratio q stands one ratio for all trained tokens of a sample, the
  geometric mean of theirs, so that a sample is clipped as a whole. rho and the denominator stay those of tokens.
* `objective = "cispo"`: -rho * min(q, 1 + clip_high) * A * log pi, the weight a constant to the gradient: a token whose
  ratio is beyond the clip still has a gradient, with a bounded weight. `clip_low` has no part in it.
* `importance_band = (low, high)` (IcePop): rho is 0 where pi_old / pi_inf is outside the band. Such tokens are out of
  the numerator and stay in the denominator, which must stand before any forward.
* `kl_beta > 0`: plus kl_beta times an estimate of KL(pi, pi_ref) for each token, without rho. With d = log pi - log
  pi_ref, k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a loss k1 has no gradient but noise, and k2 has that of the KL.
* `loss_denominator`: a constant in place of the number of trained tokens (`learner.step`); masking truncated samples
  and the other advantages are the driver's.

One optimizer step per batch makes the current policy the old one, so that q = pi / pi_old is 1 in value, and in
gradient that of the logprob; then pi_old needs no forward of its own.

Shapes: R trained tokens (the masked ones are not among them), S samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from olmorl.contract.errors import ConfigError
from olmorl.contract.training import LearnerConfig

OBJECTIVES = ("grpo", "gspo", "cispo")
KL_ESTIMATORS = ("k1", "k2", "k3")
LARGEST_LOG_RATIO = 20.0  # exp of a larger difference says nothing more, and may overflow


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss knows of each trained token beside the current logprob. None of it has a gradient."""

    old_logprobs_R: Tensor
    """of the learner before this step"""
    behaviour_logprobs_R: Tensor
    """recorded when the token was drawn"""
    advantages_R: Tensor
    sample_R: Tensor
    """int64, which sample of the micro-batch the token belongs to"""
    reference_logprobs_R: Tensor | None = None
    """wanted when kl_beta > 0"""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    loss_R: Tensor
    """per token, not yet summed nor divided; the KL term is in it"""
    importance_R: Tensor
    """pi_old / pi_inf before cap and band"""
    rho_R: Tensor
    """the weight that came of it"""
    clipped_R: Tensor
    """bool: the clip took the gradient away, or bounded its weight (cispo)"""
    kl_R: Tensor | None
    """the estimate, without kl_beta"""


def check_objective(config: LearnerConfig) -> None:
    if config.objective not in OBJECTIVES:
        raise ConfigError(f"loss.objective is {config.objective!r}; it must be one of {', '.join(OBJECTIVES)}")
    if config.kl_estimator not in KL_ESTIMATORS:
        raise ConfigError(f"loss.kl_estimator is {config.kl_estimator!r}; it must be one of {', '.join(KL_ESTIMATORS)}")


def policy_loss(logprobs_R: Tensor, tokens: TokenBatch, *, config: LearnerConfig) -> PolicyLoss:
    importance_R = _bounded_exp(tokens.old_logprobs_R - tokens.behaviour_logprobs_R)
    rho_R = _importance_weight(importance_R, cap=config.importance_cap, band=config.importance_band)
    log_q_R = logprobs_R - tokens.old_logprobs_R
    if config.objective == "gspo":
        log_q_R = _sample_mean(log_q_R, tokens.sample_R)
    q_R = _bounded_exp(log_q_R)
    if config.objective == "cispo":
        bounded_R = q_R.detach().clamp(max=1 + config.clip_high)
        gain_R = bounded_R * tokens.advantages_R * logprobs_R
        clipped_R = q_R.detach() > 1 + config.clip_high
    else:
        free_R = q_R * tokens.advantages_R
        bounded_R = q_R.clamp(1 - config.clip_low, 1 + config.clip_high) * tokens.advantages_R
        gain_R = torch.minimum(free_R, bounded_R)
        clipped_R = (bounded_R < free_R).detach()
    loss_R = -rho_R * gain_R
    kl_R = None
    if config.kl_beta > 0:
        assert tokens.reference_logprobs_R is not None, "kl_beta > 0 wants the logprobs of a reference model"
        kl_R = kl_estimate(logprobs_R - tokens.reference_logprobs_R, config.kl_estimator)
        loss_R = loss_R + config.kl_beta * kl_R
        kl_R = kl_R.detach()
    return PolicyLoss(loss_R, importance_R, rho_R, clipped_R, kl_R)


def kl_estimate(log_ratio_R: Tensor, estimator: str) -> Tensor:
    """Of KL(pi, pi_ref) from log(pi / pi_ref) of tokens drawn from pi."""
    if estimator == "k1":
        return log_ratio_R
    if estimator == "k2":
        return log_ratio_R.square() / 2
    return torch.expm1((-log_ratio_R).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)) + log_ratio_R


def _importance_weight(importance_R: Tensor, *, cap: float, band: tuple[float, float] | None) -> Tensor:
    rho_R = importance_R.clamp(max=cap)
    if band is None:
        return rho_R
    low, high = band
    return rho_R * ((importance_R >= low) & (importance_R <= high))


def _sample_mean(x_R: Tensor, sample_R: Tensor) -> Tensor:
    """At each token the mean over the trained tokens of its sample."""
    num_samples = int(sample_R.max()) + 1 if len(sample_R) else 0
    sum_S = x_R.new_zeros(num_samples).index_add(0, sample_R, x_R)
    count_S = torch.bincount(sample_R, minlength=num_samples).clamp(min=1)
    return (sum_S / count_S)[sample_R]


def _bounded_exp(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
