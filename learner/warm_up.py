"""Supervised steps: how the quickstart's weak policy is made. Deterministic given the seed: on one thread."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

IGNORED = -100  # what cross_entropy leaves out
LR_WARMUP_STEPS = 30

Example = tuple[Sequence[int], Sequence[int]]  # prompt ids, answer ids


def warm_up(
    config: PretrainedConfig, batches: Callable[[int], Sequence[Example]], *, steps: int, lr: float, seed: int
) -> PreTrainedModel:
    """A new model of `config`, trained on the answers of `batches(step)`; cosine learning rate after a short rise."""
    torch.set_num_threads(1)  # sums over several threads come out in any order
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = lr * decay * min(1.0, (step + 1) / LR_WARMUP_STEPS)
        input_ids, labels = _pad(batches(step))
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def _pad(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """[B, L] int64 token ids (0 behind the end) and labels, which are the answers' tokens alone."""
    longest = max(len(prompt) + len(answer) for prompt, answer in examples)
    input_ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : end] = input_ids[row, len(prompt) : end]
    return input_ids, labels
