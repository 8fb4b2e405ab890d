"""AdamW, its learning rate as a pure function of the policy version, and clipping by the norm over all shards.

The rate depends on nothing but the version, so there is no scheduler whose state could disagree with a checkpoint.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from olmorl.contract.errors import ConfigError
from olmorl.contract.training import LearnerConfig

SCHEDULES = ("constant", "linear", "cosine")


def build_optimizer(model: nn.Module, config: LearnerConfig) -> torch.optim.AdamW:
    """Matrices decay; norms and biases do not."""
    if config.schedule not in SCHEDULES:
        raise ConfigError(f"optim.schedule is {config.schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if params
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(config: LearnerConfig, *, version: int) -> float:
    """Rate of the step that trains `version`: linear warm-up, then the schedule down to 0 at `total_steps`."""
    if version < config.warmup_steps:
        return config.lr * (version + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (version - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, progress)
    return config.lr * (1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


def gradient_norm(model: nn.Module) -> Tensor:
    """2-norm of all gradients over all shards, on every rank."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def step_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, lr: float, norm: Tensor, max_norm: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    optimizer.step()
