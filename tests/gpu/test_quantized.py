"""Products with int8 and int4 weights against their torch twins, and an engine on them against the compiled one."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference import LLM, SamplingParams
from inference.kernels.gpu_quantized import quantized_linear
from inference.quantization import int4, int8
from inference.quantization.formats import FORMATS


@pytest.fixture(scope="module")
def quantizable(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.25, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("quantizable")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


SHAPES = [(1, 5, 3), (5, 70, 33), (17, 160, 20), (66, 70, 40)]  # tokens, inputs, outputs
COARSER = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def operands(device: torch.device, tokens: int, features: int, outputs: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x_TK, weight_NK = torch.randn(tokens, features, generator=generator), torch.randn(outputs, features)
    x_TK[:, 0] *= 30  # as real models have it
    return x_TK.to(device), weight_NK.to(device), torch.randn(outputs, generator=generator).to(device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_products_are_bitwise_those_of_the_definition(device: torch.device, shape: tuple[int, int, int]) -> None:
    x_TK, weight_NK, bias_N = operands(device, *shape)
    rows_NB = int8.quantize_rows(weight_NK)
    for bias in (None, bias_N):
        assert torch.equal(quantized_linear(x_TK, rows_NB, bias), int8.int8_linear(x_TK, rows_NB, bias))


@pytest.mark.parametrize("dtype", COARSER, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int4_products_equal_those_of_the_dense_weights(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x_TK, weight_NK, bias_N = operands(device, *shape)
    x_TK, rows_NB = x_TK.to(dtype), int4.quantize_rows(weight_NK)
    dense_NK = int4.dequantize_rows(rows_NB, shape[1])
    for bias in (None, bias_N):
        found_TN = quantized_linear(x_TK, rows_NB, bias, torch.float32)
        meant_TN = x_TK.double() @ dense_NK.double().T + (0 if bias is None else bias.double())
        error = (found_TN.double() - meant_TN).norm() / meant_TN.norm()
        assert error < 1e-6, "whatever the dtype of the tokens, nothing is rounded"
        stored_TN = quantized_linear(x_TK, rows_NB, bias)
        assert stored_TN.dtype == dtype
        torch.testing.assert_close(stored_TN.float(), found_TN, atol=COARSER[dtype] * 30, rtol=COARSER[dtype])


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_so_and_to_itself(device: torch.device, name: Any) -> None:
    x_TK, weight_NK, _ = operands(device, 5, 40, 20)
    rows_NB = FORMATS[name].quantize_rows(weight_NK)
    clean_TN = quantized_linear(x_TK, rows_NB)
    x_TK[1, 7], x_TK[3, 2] = float("nan"), float("inf")
    found_TN = quantized_linear(x_TK, rows_NB)
    assert not found_TN[1].isfinite().any() and not found_TN[3].isfinite().any()
    assert torch.equal(found_TN[[0, 2, 4]], clean_TN[[0, 2, 4]])


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_is_bitwise_the_same_alone_and_among_few(device: torch.device, name: Any) -> None:
    x_TK, weight_NK, bias_N = operands(device, 5, 70, 40)
    rows_NB = FORMATS[name].quantize_rows(weight_NK)
    together_TN = quantized_linear(x_TK, rows_NB, bias_N)
    for t in range(5):
        assert torch.equal(quantized_linear(x_TK[t : t + 1], rows_NB, bias_N)[0], together_TN[t])


def test_no_tokens(device: torch.device) -> None:
    for name, form in FORMATS.items():
        rows_NB = form.quantize_rows(torch.ones(6, 8, device=device))
        assert quantized_linear(torch.zeros((0, 8), device=device), rows_NB).shape == (0, 6), name


@pytest.mark.parametrize("name", ["int4", pytest.param("int8", marks=pytest.mark.soak)])  # slow in the interpreter
def test_an_engine_scores_as_on_torch_and_takes_updates(device: torch.device, quantizable: str, name: Any) -> None:
    options: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_tokens": 256, "block_size": 4, "device": str(device)}
    quantized = options | {"quantization": name, "quantize_head": True}
    triton, twin, dense = (
        LLM(quantizable, kernels=kernels, **kind)
        for kernels, kind in (("triton", quantized), ("torch", quantized), ("torch", options))
    )
    sequences = [np.arange(6), np.array([4, 4, 10])]
    scores = [np.concatenate(llm.score(sequences)) for llm in (triton, twin, dense)]
    between, lost = np.abs(scores[0] - scores[1]), np.abs(scores[1] - scores[2])
    assert np.median(between) < (1e-4 if name == "int8" else 1e-3), "of int4 the twin rounds tokens too"
    assert between.mean() < lost.mean() / 4
    weights = {name: tensor * 1.25 for name, tensor in dense.engine.decoder.tensors.items()}
    for llm in (triton, dense):
        llm.update_weights(weights.items(), version=1)
    cold = FORMATS[name].quantize_rows(weights["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(triton.engine.decoder.tensors["model.layers.1.mlp.down_proj.weight"], cold)
    (out,) = triton.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert out.samples[0].version_spans == [(1, 0, 2)] and triton.weights_checksum() == dense.weights_checksum()
