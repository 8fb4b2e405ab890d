"""The objective: OLMo 3's GRPO, as a pure function on tensors. As a diff from GRPO (numerics.md, section 5):

* the sum over tokens is divided by the number of trained tokens of the whole global batch, not per sample, per rank or
  per micro-batch, so that every token weighs the same however the batch is cut;
* the clip is asymmetric (clip-higher): the ratio may rise further than it may fall;
* no KL term, and no division of the advantage by the group's standard deviation (the driver computes advantages);
* a truncated importance weight corrects for tokens drawn by an engine that was not the learner before this update
  (older weights, other kernels): rho = min(pi_old / pi_inf, cap), a constant to the gradient.

One optimizer step per batch makes the current policy the old one, so that q = pi / pi_old is 1 in value, and in
gradient that of the logprob; then pi_old needs no forward of its own.

Shapes: R trained tokens (the masked ones are not among them).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0  # exp of a larger difference says nothing more, and may overflow


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    loss_R: Tensor
    """per token, not yet summed nor divided"""
    importance_R: Tensor
    """pi_old / pi_inf before the cap"""
    clipped_R: Tensor
    """bool: the clip took the gradient away"""


def policy_loss(
    logprobs_R: Tensor,
    *,
    old_logprobs_R: Tensor,
    behaviour_logprobs_R: Tensor,
    advantages_R: Tensor,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> PolicyLoss:
    """-rho * min(q A, clip(q, 1 - clip_low, 1 + clip_high) A) for each token."""
    importance_R = _bounded_exp(old_logprobs_R.detach() - behaviour_logprobs_R)
    rho_R = importance_R.clamp(max=importance_cap)
    q_R = _bounded_exp(logprobs_R - old_logprobs_R.detach())
    free_R = q_R * advantages_R
    bounded_R = q_R.clamp(1 - clip_low, 1 + clip_high) * advantages_R
    return PolicyLoss(-rho_R * torch.minimum(free_R, bounded_R), importance_R, (bounded_R < free_R).detach())


def _bounded_exp(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
