"""One training step: for every mini-batch and epoch forward and backward over the micro-batches, clip, step; report.

All ranks walk the same number of micro-batches and take every decision (is the loss finite, does the optimizer step)
from reduced numbers, so that no rank enters a collective that another one skips.

Shapes: R trained tokens of a micro-batch.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.batch_file import save_batch
from learner.device_batch import DeviceBatch
from learner.loss import TokenBatch, policy_loss
from learner.memory import peak_bytes, reset_peak
from learner.model import PolicyModel, forward_flops, reshard
from learner.optim import gradient_norm, learning_rate, step_optimizer
from learner.totals import TokenTotals
from olmorl.contract.errors import WorkerError
from olmorl.contract.training import LearnerConfig, MicroBatch, MiniBatch, RankBatch, StepReport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainState:
    """What a step changes, and a checkpoint holds."""

    policy: PolicyModel
    optimizer: torch.optim.Optimizer
    reference: PolicyModel | None = None
    """never changes, so no checkpoint holds it"""
    version: int = 0
    skipped_steps: int = 0
    """optimizer steps left out since the run began because loss or gradient was not finite"""
    skipped_in_a_row: int = 0
    """training steps without a single optimizer step, up to now; passes over a batch that is broken are one"""


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Logprobs of one micro-batch that no step changes."""

    old_R: Tensor | None
    reference_R: Tensor | None


@dataclass(slots=True)
class _Sums:
    totals: TokenTotals
    flops: float = 0.0
    denominator: float = 0.0
    norms: list[float] = field(default_factory=list)
    stepped: int = 0
    skipped: list[str] = field(default_factory=list)
    """what loss and gradient of each optimizer step were that was left out"""
    old_logprobs: list[Tensor] = field(default_factory=list)
    """of each micro-batch"""


def train_step(state: TrainState, batch: RankBatch, *, config: LearnerConfig, device: torch.device) -> StepReport:
    """Train `batch`, whose version must be the state's; afterwards the state is one version on, stepped or not."""
    began = time.perf_counter()
    reset_peak(device)
    if batch.version != state.version:
        raise WorkerError(f"a batch for policy version {batch.version} reached a learner that holds {state.version}")
    lr = learning_rate(config, version=state.version)
    sums = _Sums(TokenTotals(device=device))
    trained = [mini for mini in batch.mini_batches if mini.num_loss_tokens > 0]
    fixed = [_fixed_logprobs(state, mini, sums, config, device, steps=config.epochs * len(trained)) for mini in trained]
    for _ in range(config.epochs):
        for mini, fixed_of_mini in zip(trained, fixed, strict=True):
            _optimizer_step(state, batch.version, mini, fixed_of_mini, sums, config, device, lr=lr)
    if sums.skipped:
        _account_for_skipped(state, batch, sums, config)
    elif trained:
        state.skipped_in_a_row = 0
    metrics = _metrics(sums) if trained else {}
    state.version += 1
    metrics |= {"optim/lr": lr, "optim/skipped_steps": float(state.skipped_steps)}
    return StepReport(
        version=state.version,
        stepped=sums.stepped > 0,
        metrics=metrics,
        seconds=time.perf_counter() - began,
        num_tokens=sum(len(micro.token_ids) for micro in batch.micro_batches),
        flops=sums.flops,
        peak_bytes=peak_bytes(device),
        old_logprobs=_on_host(sums.old_logprobs[: sum(map(len, fixed))]),
    )


def _fixed_logprobs(
    state: TrainState, mini: MiniBatch, sums: _Sums, config: LearnerConfig, device: torch.device, *, steps: int
) -> list[_Fixed]:
    """For each micro-batch, before anything is stepped. A step that is the only one needs no old logprobs: they are
    its own."""
    models = (state.policy if steps > 1 else None, state.reference)

    @torch.no_grad()
    def score(model: PolicyModel | None, micro: MicroBatch) -> Tensor | None:
        if model is None:
            return None
        x = DeviceBatch.of(micro, device=device)
        sums.flops += forward_flops(state.policy, x.spans, num_scored=len(x.scored_R))
        return x.logprobs(model, temperature=config.temperature)[0]

    fixed = [_Fixed(*(score(model, micro) for model in models)) for micro in mini.micro_batches]
    for model in models:
        if model is not None:
            reshard(model)
    return fixed


def _optimizer_step(
    state: TrainState,
    version: int,
    mini: MiniBatch,
    fixed: Sequence[_Fixed],
    sums: _Sums,
    config: LearnerConfig,
    device: torch.device,
    *,
    lr: float,
) -> None:
    """Left out when loss or gradient is not finite."""
    denominator = config.loss_denominator or mini.num_loss_tokens
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for micro, known in zip(mini.micro_batches, fixed, strict=True):
        loss += _accumulate(state, DeviceBatch.of(micro, device=device), known, sums, config, version, denominator)
    dist.all_reduce(loss)
    norm = gradient_norm(state.policy)
    sums.denominator += denominator
    sums.norms.append(norm.item())
    mean = loss.item() / denominator
    if math.isfinite(mean) and math.isfinite(sums.norms[-1]):
        step_optimizer(state.optimizer, state.policy, lr=lr, norm=norm, max_norm=config.max_grad_norm)
        sums.stepped += 1
    else:
        sums.skipped.append(f"loss {mean}, gradient norm {sums.norms[-1]}")
    state.optimizer.zero_grad()


def _accumulate(
    state: TrainState,
    x: DeviceBatch,
    known: _Fixed,
    sums: _Sums,
    config: LearnerConfig,
    version: int,
    denominator: float,
) -> Tensor:
    """Add the gradients of one micro-batch; returns its summed loss."""
    logprobs_R, entropy_R = x.logprobs(state.policy, temperature=config.temperature)
    tokens = TokenBatch(
        old_logprobs_R=logprobs_R.detach() if known.old_R is None else known.old_R,
        behaviour_logprobs_R=x.behaviour_logprobs_R,
        advantages_R=x.advantages_R,
        sample_R=x.sample_R,
        reference_logprobs_R=known.reference_R,
    )
    sums.old_logprobs.append(tokens.old_logprobs_R)
    loss = policy_loss(logprobs_R, tokens, config=config)
    total = loss.loss_R.sum()
    (total / denominator).backward()
    lag_R = version - x.versions_R
    sums.totals.add(loss, tokens, entropy_R=entropy_R, lag_R=lag_R, importance_cap=config.importance_cap)
    sums.flops += 3 * forward_flops(state.policy, x.spans, num_scored=len(x.scored_R))
    return total.detach()


def _on_host(first_epoch: list[Tensor]) -> np.ndarray:
    """[R] float32; the later epochs have the same."""
    return torch.cat(first_epoch).float().cpu().numpy() if first_epoch else np.zeros(0, np.float32)


def _metrics(sums: _Sums) -> dict[str, float]:
    sums.totals.reduce()
    metrics = sums.totals.metrics(denominator=sums.denominator)
    return metrics | {"optim/grad_norm": sum(sums.norms) / len(sums.norms)}


def _account_for_skipped(state: TrainState, batch: RankBatch, sums: _Sums, config: LearnerConfig) -> None:
    """Keep the batch, and stop the run after too many."""
    state.skipped_steps += len(sums.skipped)
    state.skipped_in_a_row = 0 if sums.stepped else state.skipped_in_a_row + 1
    what = f"{sums.skipped[0]} at version {batch.version}"
    if config.nonfinite_dir is not None:
        file = Path(config.nonfinite_dir) / f"step_{batch.version:06d}_rank_{dist.get_rank()}.npz"
        try:
            save_batch(batch, file)
            what += f"; its batch is in {file}"
        except OSError as error:  # on one rank alone, and the others go on
            what += f"; its batch could not be kept: {error}"
    if dist.get_rank() == 0:
        logger.warning("training step skipped: %s", what)
    if state.skipped_in_a_row >= config.max_nonfinite_steps:
        raise WorkerError(f"{state.skipped_in_a_row} training steps in a row were not finite; the last: {what}")
