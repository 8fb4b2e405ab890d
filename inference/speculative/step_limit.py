"""Up to how many tokens a step costs about what one of a single token does: what guesses may fill it up to.

Measured on the engine's own runner, whose step of one token may be a replayed graph where one with guesses is not.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from inference.runner import Runner
from inference.step_batch import dense_batch

LARGEST = 64  # tokens, beyond which nobody looks
_WORTH = 1.35  # of the seconds of one token
_ROUNDS = 5


def measured_step_tokens(runner: Runner, *, max_tokens: int) -> int:
    """A power of two. Writes into the pools: no request may hold a block yet. `max_tokens`: of a step and a text."""
    config = runner.config
    blocks = min(config.num_blocks, config.num_window_blocks or config.num_blocks)

    def seconds(tokens: int) -> float:
        batch, _ = dense_batch([np.zeros(tokens, np.int64)], block_size=config.block_size)
        started = time.perf_counter()
        hidden_TM = runner.run(batch if config.num_window_blocks is None else replace(batch, windowed=batch))
        logits_RV = runner.logits(hidden_TM, list(range(tokens)), [])
        if logits_RV.is_cuda:
            torch.cuda.synchronize(logits_RV.device)
        return time.perf_counter() - started

    return tokens_at_the_price_of_one(seconds, most=min(LARGEST, max_tokens, blocks * config.block_size))


def tokens_at_the_price_of_one(seconds: Callable[[int], float], *, most: int) -> int:
    """`seconds` of a step of so many tokens: the least of several tries in turn, for others only slow one down."""
    tokens = 1
    while 2 * tokens <= most:
        seconds(1), seconds(2 * tokens)  # what is done at first use
        tries = [(seconds(1), seconds(2 * tokens)) for _ in range(_ROUNDS)]
        one, more = map(min, zip(*tries, strict=True))
        if more > _WORTH * one:
            break
        tokens *= 2
    return tokens
