"""The random numbers of the sampler: a 32-bit counter hash, the same in every backend.

A draw is keyed by (seed, prompt, sample, position, token id) and nothing else, so a token never depends on the batch
it was drawn in. The first four are folded into two 32-bit words a row with 64-bit arithmetic; the token id is
hashed against those words.

Suffixes: R rows, V vocabulary.
"""

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 0xFFFFFFFF


def sequence_key(prompt_key: tuple[int, int], sample_index: int) -> int:
    """64 bits for one sample of one request."""
    word = np.array([prompt_key[0] | prompt_key[1] << 32], dtype=np.uint64)
    return int(_mix64(word + np.uint64((sample_index + 1) * int(_GOLDEN) & (1 << 64) - 1))[0])


def row_words(keys_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """[R, 2] int64, two 32-bit words a row, from `sequence_key`s and the index of the token to be drawn."""
    mixed_R = _mix64(keys_R + (positions_R.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return np.stack([mixed_R & np.uint64(_MASK), mixed_R >> np.uint64(32)], axis=1).astype(np.int64)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_tokens(words_R2: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] int64 holding 32 uniform bits for each row and token id."""
    token_V = torch.arange(vocab_size, dtype=torch.int64, device=words_R2.device)
    x_RV = (token_V * 0x9E3779B1 + words_R2[:, :1]) & _MASK
    x_RV = x_RV ^ (x_RV >> 16)
    x_RV = (x_RV * 0x85EBCA6B + words_R2[:, 1:]) & _MASK
    x_RV = x_RV ^ (x_RV >> 13)
    x_RV = (x_RV * 0xC2B2AE35) & _MASK
    return x_RV ^ (x_RV >> 16)


def exponential(bits_RV: torch.Tensor) -> torch.Tensor:
    """Exponential noise, float32. The smallest values win the race, and there 32 bits resolve 2**-33.

    -log1p(-w) keeps that precision where -log(u) would round u to 1; the clamp keeps w = 1 out.
    """
    w_RV = (bits_RV.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-w_RV.clamp_(max=1 - 2.0**-24))


def gumbel(words_R2: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] float32: the token with the largest `logit + gumbel` is a draw from softmax(logits)."""
    return -torch.log(exponential(hash_tokens(words_R2, vocab_size)))
