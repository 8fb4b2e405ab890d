"""Small random models of every family, made once a session with transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # wide logits: near ties would make "token for token" a matter of luck
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "llama_tied_bias": LlamaConfig(**COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16),
    "qwen2": Qwen2Config(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3": Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "olmo2": Olmo2Config(**COMMON),
    "olmo3": Olmo3Config(
        **COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # a fresh model's are 0 and 1, which would hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def family_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in made:
            model = make_model(CONFIGS[name], seed=7)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, max_shard_size="40KB" if name == "qwen2" else "1GB")
            made[name] = (folder, model)
        return made[name]

    return get
