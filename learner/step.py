"""One training step: forward and backward over the micro-batches, clip, step, report.

All ranks walk the same number of micro-batches and take every decision (is the loss finite, does the optimizer step)
from reduced numbers, so that no rank enters a collective that another one skips.

Shapes: N tokens of a micro-batch, R trained tokens of it.
"""

import logging
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.attention import DocumentLayout
from learner.loss import policy_loss
from learner.model import PolicyModel, forward_flops
from learner.optim import gradient_norm, learning_rate, step_optimizer
from learner.totals import TokenTotals
from olmorl.contract.errors import WorkerError
from olmorl.contract.training import LearnerConfig, MicroBatch, RankBatch, StepReport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainState:
    """What a step changes, and a checkpoint holds."""

    policy: PolicyModel
    optimizer: torch.optim.Optimizer
    version: int = 0
    skipped_steps: int = 0
    """steps left out since the run began because loss or gradient was not finite"""
    skipped_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class _DeviceBatch:
    token_ids_N: Tensor
    position_ids_N: Tensor
    layout: DocumentLayout
    scored_R: Tensor
    behaviour_logprobs_R: Tensor
    advantages_R: Tensor
    versions_R: Tensor


def train_step(state: TrainState, batch: RankBatch, *, config: LearnerConfig, device: torch.device) -> StepReport:
    """Train `batch`, whose version must be the state's; afterwards the state is one version on, stepped or not."""
    began = time.perf_counter()
    if batch.version != state.version:
        raise WorkerError(f"a batch for policy version {batch.version} reached a learner that holds {state.version}")
    lr = learning_rate(config, version=state.version)
    totals = TokenTotals(device=device)
    stepped, metrics, flops = False, {}, 0.0
    if batch.num_loss_tokens > 0:
        flops = sum(_accumulate(state, batch, micro, totals, config, device) for micro in batch.micro_batches)
        totals.reduce()
        metrics = totals.metrics(num_loss_tokens=batch.num_loss_tokens)
        norm = gradient_norm(state.policy)
        metrics["optim/grad_norm"] = norm.item()
        stepped = all(math.isfinite(metrics[name]) for name in ("loss/policy", "optim/grad_norm"))
        if stepped:
            step_optimizer(state.optimizer, state.policy, lr=lr, norm=norm, max_norm=config.max_grad_norm)
            state.skipped_in_a_row = 0
        else:
            _count_skipped(state, metrics, config)
        state.optimizer.zero_grad()
    state.version += 1
    metrics |= {"optim/lr": lr, "optim/skipped_steps": float(state.skipped_steps)}
    return StepReport(
        version=state.version,
        stepped=stepped,
        metrics=metrics,
        seconds=time.perf_counter() - began,
        num_tokens=sum(len(micro.token_ids) for micro in batch.micro_batches),
        flops=flops,
    )


def _accumulate(
    state: TrainState,
    batch: RankBatch,
    micro: MicroBatch,
    totals: TokenTotals,
    config: LearnerConfig,
    device: torch.device,
) -> float:
    """Add the gradients of one micro-batch; returns the FLOPs of its forward and backward."""
    x = _to_device(micro, device)
    logprobs_R, entropy_R = state.policy(
        x.token_ids_N, x.position_ids_N, x.layout, x.scored_R, temperature=config.temperature
    )
    loss = policy_loss(
        logprobs_R,
        old_logprobs_R=logprobs_R.detach(),
        behaviour_logprobs_R=x.behaviour_logprobs_R,
        advantages_R=x.advantages_R,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        importance_cap=config.importance_cap,
    )
    (loss.loss_R.sum() / batch.num_loss_tokens).backward()
    totals.add(
        loss,
        logprobs_R=logprobs_R.detach(),
        behaviour_logprobs_R=x.behaviour_logprobs_R,
        entropy_R=entropy_R,
        lag_R=batch.version - x.versions_R,
        importance_cap=config.importance_cap,
    )
    return (
        3 * forward_flops(state.policy, x.layout.lengths, num_scored=len(x.scored_R)) if len(micro.token_ids) else 0.0
    )


def _to_device(micro: MicroBatch, device: torch.device) -> _DeviceBatch:
    """An empty micro-batch becomes one token that is not trained: the collectives need a forward to run in."""
    empty = len(micro.token_ids) == 0
    token_ids = np.zeros(1, np.int64) if empty else micro.token_ids.astype(np.int64)
    position_ids = np.zeros(1, np.int64) if empty else micro.position_ids.astype(np.int64)
    document_starts = np.array([0, 1]) if empty else micro.document_starts
    scored = np.flatnonzero(micro.loss_mask)

    def send(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return _DeviceBatch(
        token_ids_N=send(token_ids),
        position_ids_N=send(position_ids),
        layout=DocumentLayout.from_starts(document_starts, device=device),
        scored_R=send(scored),
        behaviour_logprobs_R=send(micro.behaviour_logprobs[scored]),
        advantages_R=send(micro.advantages[scored]),
        versions_R=send(micro.token_versions[scored]),
    )


def _count_skipped(state: TrainState, metrics: dict[str, float], config: LearnerConfig) -> None:
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    what = f"loss {metrics['loss/policy']}, gradient norm {metrics['optim/grad_norm']} at version {state.version}"
    if dist.get_rank() == 0:
        logger.warning("training step skipped: %s", what)
    if state.skipped_in_a_row >= config.max_nonfinite_steps:
        raise WorkerError(f"{state.skipped_in_a_row} training steps in a row were not finite; the last: {what}")
