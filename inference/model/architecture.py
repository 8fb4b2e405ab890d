"""What a model folder's config.json means: the few numbers and switches by which the supported families differ.

A new family is one more entry in `FAMILIES`, and whatever switch it needs that none before it did. Defaults are those
of transformers for the family, because a config file may leave them out. No torch here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inference.model.rope import Rope, read_rope, read_rope_by_layer_type
from olmorl.contract.errors import ModelError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    window: int | None
    """tokens a query sees, itself included; None sees all"""
    rope: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    norm_eps: float
    tied: bool
    """the output head is the embedding"""
    max_positions: int
    norms: Literal["pre", "post"] = "pre"
    """before attention and MLP, or after them and before the residual is added"""
    qk_norm: Literal["head", "whole"] | None = None
    """RMSNorm of queries and keys: each head by itself, or the whole projection"""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    @property
    def reach(self) -> int:
        """Positions that the model was made for: where ropes are stretched, config.json may name those before."""
        scalings = [layer.rope.scaling for layer in self.layers if layer.rope.scaling is not None]
        stretched = [getattr(s, "original_length", self.max_positions) * s.factor for s in scalings]
        return int(max([self.max_positions, *stretched]))


def read_architecture(folder: Path) -> Architecture:
    """Raises ModelError for a family, activation or rope type that is not supported."""
    config = read_json(folder / "config.json")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{folder}: model_type is {family!r}; supported are {', '.join(sorted(FAMILIES))}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{folder}: hidden_act is {activation!r}; only 'silu' is supported")
    try:
        return FAMILIES[family](config)
    except KeyError as missing:
        raise ModelError(f"{folder}/config.json lacks {missing}") from None
    except ModelError as error:
        raise ModelError(f"{folder}/config.json: {error}") from None


def read_json(path: Path) -> Json:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model is a Hugging Face folder with config.json") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object")
    return found


def _base(config: Json, *, eps: float, theta: float, **switches: Any) -> Architecture:
    heads = config["num_attention_heads"]
    windows = switches.pop("windows", None) or [None] * config["num_hidden_layers"]
    ropes = switches.pop("ropes", None) or [read_rope(config, default_theta=theta)] * len(windows)
    return Architecture(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        layers=tuple(Layer(window, rope) for window, rope in zip(windows, ropes, strict=True)),
        norm_eps=config.get("rms_norm_eps", eps),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=config["max_position_embeddings"],
        **switches,
    )


def _llama(config: Json) -> Architecture:
    bias = config.get("attention_bias", False)
    return _base(config, eps=1e-6, theta=1e4, qkv_bias=bias, out_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _qwen2(config: Json) -> Architecture:
    return _base(config, eps=1e-6, theta=1e4, qkv_bias=True, windows=_qwen_windows(config))


def _qwen3(config: Json) -> Architecture:
    bias = config.get("attention_bias", False)
    windows = _qwen_windows(config)
    config = {"head_dim": 128, **config}
    return _base(config, eps=1e-6, theta=1e4, qkv_bias=bias, out_bias=bias, qk_norm="head", windows=windows)


def _qwen_windows(config: Json) -> list[int | None]:
    count = config["num_hidden_layers"]
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _olmo2(config: Json) -> Architecture:
    bias = config.get("attention_bias", False)
    return _base(config, eps=1e-5, theta=1e4, norms="post", qk_norm="whole", qkv_bias=bias, out_bias=bias)


def _olmo3(config: Json) -> Architecture:
    bias = config.get("attention_bias", False)
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(count)]
    window = config.get("sliding_window", 4096)
    ropes = read_rope_by_layer_type(config, default_theta=5e5)
    return _base(
        config,
        eps=1e-5,
        theta=5e5,
        norms="post",
        qk_norm="whole",
        qkv_bias=bias,
        out_bias=bias,
        windows=[window if kind == "sliding_attention" else None for kind in kinds],
        ropes=[ropes[kind] for kind in kinds],
    )


FAMILIES: dict[str, Callable[[Json], Architecture]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
}
