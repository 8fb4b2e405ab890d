"""Rope scaling of every kind and both config layouts against transformers, also beyond the original length."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Olmo3Config, Qwen2Config

from inference import LLM, SamplingParams
from inference.model.architecture import read_architecture
from inference.model.layers import rope_table
from olmorl.contract.errors import ModelError

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# What a config.json says of its ropes, in every layout that is about.
LAYOUTS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama_linear_old": (LlamaConfig, {"rope_theta": 3e4, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama_linear_new": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}}),
    "llama_llama3_old": (LlamaConfig, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama_llama3_new": (LlamaConfig, {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama_yarn_old": (LlamaConfig, {"rope_theta": 1e4, "rope_scaling": YARN}),
    "llama_yarn_type": (LlamaConfig, {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
    "llama_yarn_length_beside": (
        LlamaConfig,
        {"original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ),
    "llama_yarn_all_keys": (
        LlamaConfig,
        {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "llama_yarn_attention_factor": (
        LlamaConfig,
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "rope_theta": 1e4, "truncate": False}},
    ),
    "qwen2_yarn": (Qwen2Config, {"rope_theta": 1e6, "rope_scaling": YARN}),
    "olmo3_theta": (Olmo3Config, {"rope_theta": 1e4}),
    "olmo3_yarn_old": (Olmo3Config, {"rope_theta": 5e5, "rope_scaling": {**YARN, "truncate": False}}),
    "olmo3_yarn_old_theta": (Olmo3Config, {"rope_theta": 1e3, "rope_scaling": YARN}),
    "olmo3_yarn_old_type": (Olmo3Config, {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "olmo3_flat": (Olmo3Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}),
    "olmo3_new": (
        Olmo3Config,
        {
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2, "beta_fast": 32.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "olmo3_new_full_theta": (
        Olmo3Config,
        {"rope_theta": 1e3, "rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e5}}},
    ),
}


def write_config(folder: Path, kind: type, ropes: dict[str, Any]) -> None:
    """As a checkpoint in the wild has it: what transformers makes of it is not written back."""
    plain = {**SMALL, "model_type": kind.model_type, **({"sliding_window": 8} if kind is Olmo3Config else {})}
    (folder / "config.json").write_text(json.dumps({**plain, **ropes}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_and_logprobs_beyond_the_original_length(layout: str, tmp_path: Path) -> None:
    write_config(tmp_path, *LAYOUTS[layout])
    config = AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    rotary = model.model.rotary_emb
    positions = torch.arange(32768)[None]
    architecture = read_architecture(tmp_path)
    for index, layer in enumerate(architecture.layers):
        kind = (config.layer_types[index],) if config.model_type == "olmo3" else ()
        cos, sin = rotary(torch.empty(0), positions, *kind)
        head_dim = architecture.head_dim
        table = rope_table(layer.rope, head_dim=head_dim, num_positions=32768, device=torch.device("cpu"))
        assert torch.equal(table[0], cos[0, :, : head_dim // 2]) and torch.equal(table[1], sin[0, :, : head_dim // 2])

    untouched = (tmp_path / "config.json").read_text()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(untouched)
    prompt = np.random.default_rng(2).integers(0, 61, 120).tolist()
    params = SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=True)
    out = LLM(str(tmp_path), max_tokens_per_step=50).generate([prompt], params)[0]
    ids = torch.tensor(prompt + out.samples[0].token_ids)
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    assert out.samples[0].token_ids == logits[119:-1].argmax(-1).tolist()
    expected = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
    assert out.prompt_logprobs is not None
    difference = np.abs(np.array([*out.prompt_logprobs[1:], *out.samples[0].raw_logprobs]) - expected)
    assert difference.max() < 1e-4 and difference.mean() < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_ropes_that_cannot_be_served_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    write_config(tmp_path, LlamaConfig, {"rope_scaling": {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(ModelError, match=f"rope type '{kind}' is not supported.*supported are default, linear, llama3"):
        LLM(str(tmp_path))
    write_config(tmp_path, Olmo3Config, {"rope_scaling": {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(ModelError, match=f"rope type '{kind}'"):
        LLM(str(tmp_path))


def test_incomplete_and_partial_ropes_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, LlamaConfig, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}})
    with pytest.raises(ModelError, match="lacks 'low_freq_factor'"):
        LLM(str(tmp_path))
    write_config(tmp_path, LlamaConfig, {"partial_rotary_factor": 0.5})
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5"):
        LLM(str(tmp_path))
    write_config(tmp_path, LlamaConfig, {"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}})
    with pytest.raises(ModelError, match="differ by layer type"):
        LLM(str(tmp_path))
