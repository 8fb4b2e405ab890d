"""Logprobs of the prompts of a step, for requests that ask for them."""

import numpy as np
import torch

from inference.runner import Runner
from inference.scheduler import StepPlan


def record_prompt_logprobs(plan: StepPlan, hidden_TM: torch.Tensor, runner: Runner) -> None:
    """`hidden_TM`: of the step's tokens. Before they count as computed."""
    start = 0
    for sequence, count in plan.chunks:
        known = sequence.request.prompt_logprobs
        first = sequence.num_computed
        # Only what is new: a sample that computes the prompt again finds its logprobs already there.
        if known is not None and first + 1 <= len(known) < sequence.num_prompt:
            skip = len(known) - first - 1
            stop = min(first + count, sequence.num_prompt - 1)
            targets = np.array(sequence.token_ids[first + skip + 1 : stop + 1], np.int64)
            rows = hidden_TM[start + skip : start + stop - first]
            if len(targets):
                known.extend(runner.given_logprobs(rows, targets).tolist())
        start += count
