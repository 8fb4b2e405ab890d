"""What a config.json says about rotary positions, in the old layout and the new, as transformers reads it.

Two layouts are about: `rope_theta` with `rope_scaling` beside it, and transformers 5's `rope_parameters`, which holds
both and may hold one entry for each layer type. No torch here; frequencies are made in `inference.model.frequencies`.
"""

import math
from dataclasses import dataclass
from typing import Any

from olmorl.contract.errors import ModelError

Json = dict[str, Any]
LAYER_TYPES = ("full_attention", "sliding_attention")
_REASONS = {
    "dynamic": "its frequencies follow the longest request of a batch, so that a token would depend on its neighbours",
    "longrope": "its frequencies switch within a request, which keys in the cache cannot follow",
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_length: int


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    magnitude: float = 1.0
    """multiplies cosines and sines"""


def read_rope(config: Json, *, default_theta: float) -> Rope:
    """One rope for all layers. The old `rope_scaling` wins over `rope_parameters`."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    for layer_type in LAYER_TYPES:
        if layer_type in found:
            raise ModelError(f"rope_parameters differ by layer type ({layer_type!r}), which this family does not have")
    # A length beside the dict wins over the one inside, and the window of the model is the last resort.
    length = config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings")
    theta = found.get("rope_theta") or config.get("rope_theta") or default_theta
    found = {**found, "original_max_position_embeddings": length}
    return _rope(found, config, theta, truncate=found.get("truncate", True))


def read_rope_by_layer_type(config: Json, *, default_theta: float) -> dict[str, Rope]:
    """OLMo 3's reading: scaling and `rope_theta` of the old layout reach full attention alone.

    A sliding layer then takes the family's theta, whatever `rope_theta` says; a flat `rope_parameters` counts for
    nothing. Checkpoints were trained by such code, so it is what must match.
    """
    nested = config.get("rope_parameters") or {}
    full = (nested.get("full_attention") or {"rope_type": "default"}) | (config.get("rope_scaling") or {})
    sliding = nested.get("sliding_attention") or {}
    truncate = nested.get("truncate", True)  # looked for beside the layer types, where a checkpoint never has it
    theta = config.get("rope_theta") or default_theta
    return {
        "full_attention": _rope(full, config, full.get("rope_theta") or theta, truncate=truncate),
        "sliding_attention": _rope(sliding, config, sliding.get("rope_theta") or default_theta, truncate=truncate),
    }


def _rope(found: Json, config: Json, theta: float, *, truncate: bool) -> Rope:
    kind = found.get("rope_type") or found.get("type") or "default"
    partial = found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor is {partial}; only whole heads are rotated here")
    length = found.get("original_max_position_embeddings") or config["max_position_embeddings"]
    theta = float(theta)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, LinearScaling(float(found["factor"])))
    if kind == "llama3":
        factor, low, high = (float(found[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        return Rope(theta, Llama3Scaling(factor, low, high, length))
    if kind == "yarn":
        return _yarn(found, config, theta, length, truncate)
    reason = f": {_REASONS[kind]}" if kind in _REASONS else ""
    raise ModelError(f"rope type {kind!r} is not supported{reason}; supported are default, linear, llama3, yarn")


def _yarn(found: Json, config: Json, theta: float, length: int, truncate: bool) -> Rope:
    factor = found["factor"]
    if factor is None:
        factor = config["max_position_embeddings"] / length
    magnitude = found.get("attention_factor")
    if magnitude is None:
        mscale, mscale_all = found.get("mscale"), found.get("mscale_all_dim")
        if mscale and mscale_all:
            magnitude = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all)
        else:
            magnitude = _yarn_magnitude(factor, 1.0)
    fast, slow = found.get("beta_fast") or 32, found.get("beta_slow") or 1
    scaling = YarnScaling(float(factor), float(fast), float(slow), truncate, length)
    return Rope(theta, scaling, float(magnitude))


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
