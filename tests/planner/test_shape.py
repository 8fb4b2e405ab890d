"""What the planner counts of a model is what the engine holds and reads of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference import LLM
from olmorl.config.load import load_config
from olmorl.planner.plan import candidates
from olmorl.planner.question import question_of
from olmorl.planner.shape import SHAPES, model_shape

CONFIG = str(Path(__file__).parents[2] / "configs" / "qwen3_8b_8gpus.toml")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("quantization", "head"), [(None, False), ("int8", False), ("int8", True), ("int4", True)])
def test_bytes_are_those_of_the_engine(tmp_path: Path, quantization: str | None, head: bool, tied: bool) -> None:
    """Norms apart, which the planner does not count. Sizes are odd, so that rows are padded."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=40, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    decoder = LLM(tmp_path, dtype="bfloat16", quantization=quantization, quantize_head=head).engine.decoder
    shape = replace(model_shape(str(tmp_path)), quantization=quantization, quantize_head=head)
    norms = sum(tensor.nbytes for name, tensor in decoder.tensors.items() if "norm" in name)
    assert shape.streamed_bytes == decoder.streamed_bytes - norms
    embedding = 0 if decoder.head is decoder.embedding else decoder.embedding.nbytes
    assert shape.weight_bytes == shape.streamed_bytes + embedding


def test_a_quantised_run_decodes_faster_trains_alike_and_lies_on_one_device() -> None:
    plain, int8, int4 = (
        question_of(load_config(CONFIG, settings), num_devices=8, device_name="h100")
        for settings in ([], ["inference.quantization=int8"], ["inference.quantization=int4"])
    )
    seconds = [q.run.engine.step_seconds(tokens=1, sequences=1, pairs=1, reads=1) for q in (plain, int8, int4)]
    weights = SHAPES["qwen3-8b"].active_parameters * 2 / (3.35e12 * 0.75)
    assert 0.4 * weights < seconds[0] - seconds[1] < 0.5 * weights < seconds[0] - seconds[2] < 0.75 * weights
    assert plain.shape == int8.shape and int8.shape.quantization is None, "updates and the learner are not quantised"
    assert {degree for _, degree, _ in candidates(plain)} == {1, 2}
    assert {degree for _, degree, _ in candidates(int8)} == {1}, "as the config wants it"
