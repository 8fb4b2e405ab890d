"""GPTQ and AWQ made here: algorithms against plain ones, words against a reader written bit by bit, whole models."""

from typing import Any

import numpy as np
import pytest
import torch

from inference.model.architecture import Architecture, Layer
from inference.model.decoder import Decoder
from inference.model.kv_pools import KVPools
from inference.model.rope import Rope
from inference.quantization.awq import best_scale
from inference.quantization.calibrate import Method, _scale_inputs, quantize_layers
from inference.quantization.checkpoint import check_shapes, packing_of
from inference.quantization.gptq import DAMPING, gptq
from inference.quantization.grid import Grid, Quantized, output_error, round_to_nearest
from inference.quantization.packed import Packing, packed, unpacked
from inference.step_batch import dense_batch
from olmorl.contract.errors import ConfigError

CPU = torch.device("cpu")
SEQUENCES = [np.random.default_rng(seed).integers(0, 61, 40) for seed in range(6)]


def correlated(tokens: int, features: int, seed: int = 0) -> torch.Tensor:
    """Tokens of few directions, some features far larger than others."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, 12, generator=generator) @ torch.randn(12, features, generator=generator)
    return (mixed + torch.randn(tokens, features, generator=generator)) * torch.logspace(-1, 1, features)


def plain_gptq(weight_NK: torch.Tensor, hessian_KK: torch.Tensor, grid: Grid) -> torch.Tensor:
    """One input after the other, the inverse of what is left of the Hessian made anew each time: no blocks."""
    w_NK, features = weight_NK.double().clone(), weight_NK.shape[1]
    damped_KK = hessian_KK.double() + DAMPING * hessian_KK.double().diagonal().mean() * torch.eye(features)
    numbers_NK = torch.empty_like(w_NK)
    for k in range(features):
        if k % grid.group_size == 0:
            scale_N, zero_N = grid.fit(w_NK[:, k : k + grid.group_size].float())
        inverse = damped_KK[k:, k:].inverse()
        numbers_NK[:, k] = grid.round(w_NK[:, k], scale_N, zero_N)
        off_N = w_NK[:, k] - (numbers_NK[:, k] - zero_N) * scale_N
        w_NK[:, k:] -= off_N[:, None] / inverse[0, 0] * inverse[0]
    return numbers_NK


@pytest.mark.parametrize(
    ("bits", "symmetric", "group_size"), [(4, True, 32), (3, False, 32), (8, True, 32), (4, True, 80), (4, False, 160)]
)
def test_gptq_equals_the_plain_algorithm(bits: int, symmetric: bool, group_size: int) -> None:
    x_TK, weight_NK = correlated(400, 160), torch.randn(9, 160, generator=torch.Generator().manual_seed(1))
    hessian_KK, grid = x_TK.T @ x_TK, Grid(bits, group_size, symmetric)
    found = gptq(weight_NK, hessian_KK, grid)
    differ = found.numbers_NK.double() != plain_gptq(weight_NK, hessian_KK, grid)
    assert differ.float().mean() < 0.005, "float32 and float64 round a tie now and then to different sides"


@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq_loses_less_than_rounding_to_nearest(desc_act: bool) -> None:
    x_TK, weight_NK = correlated(400, 128), torch.randn(24, 128, generator=torch.Generator().manual_seed(1))
    hessian_KK, grid = x_TK.T @ x_TK, Grid(4, 32, True)
    found = gptq(weight_NK, hessian_KK, grid, desc_act=desc_act)
    error = output_error(weight_NK, found.dense(), hessian_KK)
    nearest = output_error(weight_NK, round_to_nearest(weight_NK, grid).dense(), hessian_KK)
    assert error < 0.8 * nearest
    direct = (x_TK @ (weight_NK - found.dense()).T).norm() / (x_TK @ weight_NK.T).norm()
    assert error == pytest.approx(direct.item(), rel=1e-3)
    assert found.group_K.bincount().tolist() == [32] * 4
    if desc_act:
        order_K = hessian_KK.diagonal().argsort(descending=True)
        assert found.group_K[order_K].tolist() == [k // 32 for k in range(128)]
    else:
        assert found.group_K.tolist() == [k // 32 for k in range(128)]


def test_an_input_that_is_always_zero_is_rounded_by_itself() -> None:
    x_TK, weight_NK, grid = correlated(300, 64), torch.randn(8, 64), Grid(4, 64, True)
    x_TK[:, 5] = 0
    found, nearest = gptq(weight_NK, x_TK.T @ x_TK, grid), round_to_nearest(weight_NK, grid)
    assert torch.equal(found.scales_GN, nearest.scales_GN)
    assert torch.equal(found.numbers_NK[:, 5], nearest.numbers_NK[:, 5])


def test_awq_gives_large_inputs_finer_steps() -> None:
    x_TK, weight_NK = correlated(400, 128), torch.randn(24, 128, generator=torch.Generator().manual_seed(1))
    hessian_KK, grid = x_TK.T @ x_TK, Grid(4, 32, False)
    scale_K = best_scale(weight_NK, hessian_KK, grid)
    scaled = round_to_nearest(weight_NK * scale_K, grid).dense() / scale_K
    nearest = round_to_nearest(weight_NK, grid).dense()
    assert output_error(weight_NK, scaled, hessian_KK) < 0.9 * output_error(weight_NK, nearest, hessian_KK)
    assert scale_K[-16:].mean() > 1.5 * scale_K[:16].mean()


def bit_by_bit(words: np.ndarray, bits: int) -> list[int]:
    """The numbers in some words, lowest bit of the first word first. Slow, and shares nothing with what it checks."""
    stream = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    return [stream >> (bits * i) & ((1 << bits) - 1) for i in range(32 * len(words) // bits)]


@pytest.mark.parametrize(("method", "bits"), [("gptq", 2), ("gptq", 3), ("gptq", 4), ("gptq", 8), ("awq", 4)])
def test_words_are_those_that_other_programs_read(method: Any, bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    top = 1 << bits
    weights = Quantized(
        torch.randint(0, top, (32, 64), generator=generator, dtype=torch.uint8),
        torch.rand((2, 32), generator=generator).half().float(),
        torch.randint(0, top, (2, 32), generator=generator).float(),
        torch.randperm(64, generator=generator) // 32 if method == "gptq" else torch.arange(64) // 32,
    )
    packing = Packing(method, bits, 32, zero_offset=int(method == "gptq"))
    parts = packed(weights, packing)
    qweight, qzeros = parts["qweight"].numpy(), parts["qzeros"].numpy()
    numbers, zeros = weights.numbers_NK.tolist(), weights.zeros_GN.int().tolist()
    if method == "gptq":
        assert [bit_by_bit(qweight[:, n], bits) for n in range(32)] == numbers
        assert [bit_by_bit(row, bits) for row in qzeros] == [[(z - 1) % top for z in row] for row in zeros]
    else:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # columns of a word, from its lowest nibble on

        def columns(words: np.ndarray) -> list[int]:
            eights = np.array(bit_by_bit(words, 4)).reshape(-1, 8)
            return eights[:, np.argsort(order)].reshape(-1).tolist()

        assert [columns(row) for row in qweight] == np.array(numbers).T.tolist()
        assert [columns(row) for row in qzeros] == zeros
    ((name, dense),) = unpacked([(f"m.{part}", tensor) for part, tensor in parts.items()], packing)
    assert name == "m.weight" and torch.equal(dense, weights.dense())


def make_decoder(**switches: Any) -> Decoder:
    heads, kv_heads = switches.pop("heads", (4, 2))
    arch = Architecture(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_heads=heads, num_kv_heads=kv_heads, head_dim=16,
        layers=(Layer(None, Rope(1e4)), Layer(9, Rope(1e4))), norm_eps=1e-5, tied=False, max_positions=64, **switches,
    )  # fmt: skip
    decoder = Decoder(arch, dtype=torch.float32, device=CPU, max_model_len=64, kernels="torch")
    generator = torch.Generator().manual_seed(3)
    for tensor in decoder.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.ndim == 1))
    return decoder


def outputs(decoder: Decoder) -> torch.Tensor:
    batch, blocks = dense_batch(SEQUENCES, block_size=16)
    pools = KVPools(decoder.arch, blocks, None, block_size=16, dtype=torch.float32, device=CPU)
    return decoder.forward_torch(batch, pools)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norms": "post", "qk_norm": "whole"},
        {"heads": (4, 4), "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    ],
    ids=["plain", "post", "bias"],
)
def test_scaled_inputs_leave_the_model_as_it_was(switches: dict[str, Any]) -> None:
    decoder = make_decoder(**switches)
    before, weights = outputs(decoder), {name: tensor.clone() for name, tensor in decoder.tensors.items()}
    for layer in decoder.layers:
        sizes = {"qkv": 64, "out": 64, "gate_up": 64, "down": 96}
        hessians = {field: correlated(200, size).T @ correlated(200, size) for field, size in sizes.items()}
        _scale_inputs(decoder, layer, hessians, Grid(4, 32, False))
    torch.testing.assert_close(outputs(decoder), before, atol=1e-4, rtol=1e-4)
    changed = {
        name.rpartition("layers.")[2] for name, tensor in decoder.tensors.items() if not tensor.equal(weights[name])
    }
    assert "1.mlp.down_proj.weight" in changed and "1.mlp.up_proj.weight" in changed
    assert ("1.self_attn.o_proj.weight" in changed) == ("heads" in switches), "nothing divides a value that heads share"
    assert ("1.self_attn.q_proj.weight" in changed) == ("norms" not in switches), "nor what comes off a residual"


@pytest.mark.parametrize("method", ["nearest", "gptq", "awq"])
@pytest.mark.parametrize("switches", [{}, {"norms": "post", "qk_norm": "whole"}], ids=["plain", "post"])
def test_what_is_left_in_the_decoder_is_what_is_stored(method: Method, switches: dict[str, Any]) -> None:
    decoder, dense = make_decoder(**switches), make_decoder(**switches)
    grid = Grid(4, 32, symmetric=method == "gptq")
    matrices = list(quantize_layers(decoder, SEQUENCES, method=method, grid=grid))
    modules = {name: module for matrix in matrices for name, module in matrix.modules.items()}
    assert set(modules) == {name.removesuffix(".weight") for name in dense.tensors if name.endswith("_proj.weight")}
    for name, module in modules.items():
        assert torch.equal(module.dense(), decoder.tensors[f"{name}.weight"]), name
    reports = [matrix.report for matrix in matrices]
    assert [report.name for report in reports[:4]] == [f"model.layers.0.{f}" for f in ("qkv", "out", "gate_up", "down")]
    if method == "nearest":
        assert all(report.error == report.nearest_error for report in reports)
    else:
        assert sum(report.error for report in reports) < sum(report.nearest_error for report in reports)
        assert all(report.error < 1.02 * report.nearest_error for report in reports)
    lost = (outputs(decoder) - outputs(dense)).norm() / outputs(dense).norm()
    assert 0.01 < lost < 0.5


def test_what_a_format_has_no_words_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"GPTQ checkpoints have 2, 3, 4, 8 bits; 5 is not among them"):
        packing_of("gptq", Grid(5, 32, True))
    with pytest.raises(ConfigError, match=r"AWQ checkpoints have 4 bits; 8 is not among them"):
        packing_of("awq", Grid(8, 32, False))
    with pytest.raises(ConfigError, match=r"group_size is 128, which does not divide the 64 inputs.*take 32 or a div"):
        check_shapes(make_decoder().arch, packing_of("gptq", Grid(4, 128, True)))
