"""Rotation frequencies of each rope scaling, in float32 and in transformers' order of operations.

The order matters: at position 30,000 one rounding of a frequency turns a key by a thousandth of a radian.

Suffix: F half of the head size.
"""

import math

import torch

from inference.model.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling


def rope_frequencies(rope: Rope, *, head_dim: int) -> torch.Tensor:
    """[F] float32, in radians a position."""
    powers_F = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if isinstance(rope.scaling, LinearScaling):
        return 1.0 / powers_F / rope.scaling.factor
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(1.0 / powers_F, rope.scaling)
    if isinstance(rope.scaling, YarnScaling):
        return _yarn(powers_F, rope.theta, rope.scaling)
    return 1.0 / powers_F


def _llama3(plain_F: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_length
    waves_F = 2 * math.pi / plain_F
    scaled_F = torch.where(waves_F > length / low, plain_F / scaling.factor, plain_F)
    share_F = (length / waves_F - low) / (high - low)
    blended_F = (1 - share_F) * scaled_F / scaling.factor + share_F * scaled_F
    between_F = (waves_F >= length / high) & (waves_F <= length / low)
    return torch.where(between_F, blended_F, scaled_F)


def _yarn(powers_F: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Dimensions that turn often within the original length are kept, those that hardly turn are stretched."""
    half = len(powers_F)

    def dimension(rotations: float) -> float:
        return half * math.log(scaling.original_length / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    kept_F = 1 - ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers_F) * (1 - kept_F) + 1.0 / powers_F * kept_F
