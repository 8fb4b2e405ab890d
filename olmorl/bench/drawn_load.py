"""A load whose response lengths and rewards are drawn, not the model's doing: what is measured is the system.

Everything else is real: a model folder with random weights, prompts in a file, engines that draw each token, a verifier
in its process, training steps. The rows say how many tokens each sample is given (`lengths_column`), and the answer of
a row is a length: longer responses are right. So a group carries signal or not, as drawn.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from olmorl.planner.load import Load
from olmorl.quickstart.tokenizer import BOS, EOS, SYMBOLS, build_tokenizer

LENGTHS_COLUMN = "response_tokens"
VERIFIER = "olmorl.bench.drawn_load:longer_than"
DIGITS = "0123456789"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Of a Llama with random weights, tied to its embedding."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 4096


def longer_than(
    completion: str, ground_truth: object, prompt: str | None = None, *, num_tokens: int | None = None
) -> float:
    """1 for a response of more tokens than `ground_truth`."""
    length = len(completion.split()) if num_tokens is None else num_tokens
    return float(length > int(str(ground_truth)))


def write_rows(path: Path, load: Load, *, rows: int, samples_per_prompt: int, seed: int) -> None:
    """The first groups of `load`, a row each, in the order in which a simulation admits them."""
    with path.open("w") as file:
        for number in range(rows):
            lengths, has_signal = load.group(number, samples_per_prompt, seed=seed)
            if has_signal and len(set(lengths)) == 1:  # of equal lengths none can be told to be right
                lengths = [*lengths[:-1], max(1, lengths[-1] - 1)]
            rng = random.Random(f"prompt/{seed}/{number}")
            prompt = "".join(rng.choices(DIGITS, k=load.prompt_tokens - 1))  # and BOS
            answer = min(lengths) if has_signal else max(lengths)
            file.write(json.dumps({"prompt": prompt, "answer": answer, LENGTHS_COLUMN: lengths}) + "\n")


def write_model(folder: Path, size: ModelSize, *, max_tokens: int, seed: int = 0) -> None:
    """A Hugging Face folder with the tokenizer of the quickstart, whose symbols are the first of the vocabulary."""
    folder.mkdir(parents=True)
    head_dim = size.hidden_size // size.num_heads
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size, "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers, "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads, "head_dim": head_dim, "max_position_embeddings": max_tokens,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False,
        "bos_token_id": SYMBOLS.index(BOS), "eos_token_id": SYMBOLS.index(EOS),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)
    wide, narrow = size.num_heads * head_dim, size.num_kv_heads * head_dim
    hidden, inner = size.hidden_size, size.intermediate_size
    shapes = {"model.embed_tokens.weight": (size.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for i in range(size.num_layers):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,), f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (wide, hidden), f"{layer}self_attn.k_proj.weight": (narrow, hidden),
            f"{layer}self_attn.v_proj.weight": (narrow, hidden), f"{layer}self_attn.o_proj.weight": (hidden, wide),
            f"{layer}mlp.gate_proj.weight": (inner, hidden), f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * np.float32(0.02)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save_pretrained(folder)
