"""Rank 0 alone reads a model, and every rank holds it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from learner.loader import load_sharded
from learner.memory import peak_bytes, reset_peak
from learner.model import full_tensor
from learner.trainer import make_mesh
from olmorl.contract.errors import ModelError
from tests.learner.conftest import CONFIGS, DEEPSEEK, SHAPE, in_ranks

CPU = torch.device("cpu")
UNTIED = "a head of its own against what the config says"
MODELS: dict[str, PreTrainedConfig] = {
    "tied, its rope scaled": LlamaConfig(
        **SHAPE,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "two ropes": CONFIGS["olmo3"](),
    "experts": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    "a buffer that is saved": DeepseekV3Config(**DEEPSEEK),
    UNTIED: LlamaConfig(**SHAPE, tie_word_embeddings=True),
}

Held = tuple[dict[str, np.ndarray], bool]
"""Parameters and buffers by name, and whether embedding and head are one."""


def held(paths: list[str], shard_size: int | None) -> list[Held]:
    """Of each model. Only rank 0 knows where it is."""
    found = []
    for path in paths:
        mine = path if dist.get_rank() == 0 else "no/such/folder"
        policy = load_sharded(mine, make_mesh(CPU, shard_size=shard_size), compute_dtype=torch.float32)
        model = policy.causal_lm
        tensors = {n: full_tensor(p, dtype=torch.float32) for n, p in policy.hugging_face_parameters().items()}
        tensors |= dict(model.named_buffers())
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        found.append(({name: tensor.numpy().copy() for name, tensor in tensors.items()}, tied))
    return found


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, None), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_every_rank_holds_what_rank_0_read(tmp_path: Path, world_size: int, shard_size: int | None) -> None:
    """Bit for bit, and what a model computes at load too: buffers that no file holds."""
    torch.manual_seed(1)
    paths = []
    for number, (name, config) in enumerate(MODELS.items()):
        model = AutoModelForCausalLM.from_config(config)
        for of_buffer, buffer in model.named_buffers():
            if of_buffer.endswith("e_score_correction_bias"):
                buffer.normal_()
        folder = tmp_path / str(number)
        paths.append(str(folder))
        model.save_pretrained(folder)
        if name == UNTIED:
            weights = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.randn(23, 32)}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ranks = in_ranks(world_size, held, paths, shard_size)
    for number, (path, name) in enumerate(zip(paths, MODELS, strict=True)):
        alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        expected = {n: t.detach().numpy() for n, t in [*alone.named_parameters(), *alone.named_buffers()]}
        for tensors, tied in (found[number] for found in ranks):
            assert tied == name.startswith("tied")
            assert tensors.keys() == expected.keys()
            for one, tensor in tensors.items():
                np.testing.assert_array_equal(tensor, expected[one], err_msg=f"{name}: {one}")


def refused(path: str) -> str:
    try:
        load_sharded(path, make_mesh(CPU, shard_size=None), compute_dtype=torch.float32)
    except ModelError as error:
        return str(error)
    return ""


def test_a_model_that_rank_0_cannot_read_is_refused_by_all(model_folder: Callable[[str], str], tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    AutoModelForCausalLM.from_config(CONFIGS["olmo2"]()).save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    one, two = in_ranks(2, refused, str(folder))
    assert one == two and f"cannot load the model '{folder}'" in one


def peak_of_load(path: str) -> int:
    reset_peak(CPU)
    before = peak_bytes(CPU)
    policy = load_sharded(path, make_mesh(CPU, shard_size=None), compute_dtype=torch.float32)
    return peak_bytes(CPU) - before if policy.num_parameters else 0


def test_the_model_is_whole_on_one_rank_alone(tmp_path: Path) -> None:
    config = LlamaConfig(
        **SHAPE | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    size = 4 * model.num_parameters()
    first, second = in_ranks(2, peak_of_load, str(tmp_path))
    assert second + size / 2 < first, f"{first >> 20} and {second >> 20} MB of a model of {size >> 20}"
