"""GPTQ and AWQ: words made by hand, and whole checkpoints against the dense models they stand for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inference import LLM
from inference.quantization.packed import Packing, read_packing, unpacked
from olmorl.contract.errors import ModelError


def words(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32))


def dense(packing: Packing, **parts: torch.Tensor) -> list[list[float]]:
    ((name, weight),) = unpacked([(f"layer.{part}", tensor) for part, tensor in parts.items()], packing)
    assert name == "layer.weight" and weight.dtype == torch.float32
    return weight.tolist()


@pytest.mark.parametrize(("layout", "zero"), [("gptq", 3), ("gptq_v2", 4)])
def test_gptq_by_hand(layout: str, zero: int) -> None:
    """One output that reads 0, 1, ... 7, lowest nibble first; zeros of eight outputs in a word."""
    packing = read_packing(
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": layout}}
    )
    assert packing is not None
    qweight = words(0x76543210).reshape(1, 1).repeat(1, 8)
    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    found = dense(packing, qweight=qweight, qzeros=words(int(f"{zero}" * 8, 16)).reshape(1, 1), scales=scales)
    assert found == [[-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]] * 8


def test_a_zero_of_nought_in_gptq_v1_is_stored_as_minus_one() -> None:
    parts = {"qweight": words(0x76543210).reshape(1, 1).repeat(1, 8), "scales": torch.ones(1, 8)}
    found = dense(Packing("gptq", 4, -1, zero_offset=1), qzeros=words(0xFFFFFFFF).reshape(1, 1), **parts)
    assert found[0] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_desc_act_says_which_group_an_input_is_of() -> None:
    """Inputs 1 and 6 belong to the second group, which has another scale and zero."""
    parts = {
        "qweight": words(0x55555555).reshape(1, 1).repeat(1, 8),
        "qzeros": words(0x11111111, 0x33333333).reshape(2, 1),
        "scales": torch.tensor([[1.0] * 8, [10.0] * 8]),
        "g_idx": torch.tensor([0, 1, 0, 0, 0, 0, 1, 0], dtype=torch.int32),
    }
    assert dense(Packing("gptq", 4, 4), **parts)[0] == [4, 20, 4, 4, 4, 4, 20, 4]


def test_three_bits_lie_across_words() -> None:
    """32 numbers in 3 words: the eleventh has two bits in the first word and one in the second."""
    numbers = [(5 * i + 3) % 8 for i in range(32)]
    stream = sum(number << (3 * i) for i, number in enumerate(numbers))
    column = words(*(stream >> (32 * w) & 0xFFFFFFFF for w in range(3))).reshape(3, 1).repeat(1, 32)
    parts = {"qweight": column, "qzeros": torch.zeros(1, 3, dtype=torch.int32), "scales": torch.ones(1, 32)}
    assert dense(Packing("gptq", 3, 32), **parts) == [[float(number) for number in numbers]] * 32


def test_awq_by_hand() -> None:
    """Eight outputs of one input: the word holds columns 0, 2, 4, 6, 1, 3, 5, 7 from its lowest nibble up."""
    packing = read_packing({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 1}})
    assert packing is not None
    scales = torch.tensor([[1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]])
    found = dense(packing, qweight=words(0x75316420)[None], qzeros=words(0x20000001)[None], scales=scales)
    assert [row[0] for row in found] == [0 - 1, 2, 2, 3, 4, 5, 6, (7 - 2) * 0.5]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"quant_method": "gptq", "bits": 5}, "GPTQ in 5 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "in words of int16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": None}, "group_size is None"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ("gptq", "quantization_config is 'gptq'; it must be an object"),
    ],
)
def test_other_formats_are_refused_by_name(found: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_packing({"quantization_config": found})


@pytest.mark.parametrize(
    ("found", "zero_offset"),
    [
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2"}, 0),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "checkpoint_format": "gptq"}, 1),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int32"}, 1),
        ({"quant_method": "awq", "bits": 4, "format": "GEMM"}, 0),
    ],
)
def test_a_layout_has_two_names_and_the_older_one_counts(found: dict[str, Any], zero_offset: int) -> None:
    """As transformers reads them: a v2 checkpoint taken for v1 would have every zero off by one."""
    assert read_packing({"quantization_config": found}) == Packing(found["quant_method"], 4, 128, zero_offset)


@pytest.mark.parametrize(
    "g_idx",
    [
        torch.tensor([-1, 0, 0, 0, 1, 1, 1, 1]),
        torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]),
        torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1]),
        torch.empty(0, dtype=torch.int32),
    ],
    ids=["below 0", "beyond the scales", "an input short", "no whole numbers", "empty"],
)
def test_inputs_of_groups_that_are_not_there(g_idx: torch.Tensor) -> None:
    parts = {"qweight": words(0x76543210).reshape(1, 1).repeat(1, 8), "scales": torch.ones(2, 8)}
    with pytest.raises(ModelError, match=r"g_idx .* do not belong together"):
        dense(Packing("gptq", 4, 4), qzeros=words(0, 0).reshape(2, 1), g_idx=g_idx, **parts)


def test_parts_that_do_not_belong_together() -> None:
    parts = {"qweight": words(0x76543210).reshape(1, 1).repeat(1, 8), "scales": torch.ones(1, 8)}
    with pytest.raises(ModelError, match=r"layer\.qzeros is missing"):
        dense(Packing("gptq", 4, -1), **parts)
    with pytest.raises(ModelError, match="do not belong together"):
        dense(Packing("gptq", 4, 4), qzeros=words(0).reshape(1, 1), **parts)
    for wrong in (parts["qweight"].long(), parts["qweight"][0]):
        with pytest.raises(ModelError, match="do not belong together"):
            dense(Packing("gptq", 4, -1), **(parts | {"qweight": wrong, "qzeros": words(0).reshape(1, 1)}))


@pytest.mark.parametrize("packing", [Packing("awq", 4, 16), Packing("awq", 4, 4), Packing("awq", 4, -1)])
def test_groups_of_another_size_than_the_config_says(packing: Packing) -> None:
    """Larger ones would fit too, over some of the scales."""
    parts = {"qweight": torch.zeros(32, 1), "qzeros": torch.zeros(4, 1), "scales": torch.ones(4, 8)}
    integers = {part: tensor.int() for part, tensor in parts.items() if part != "scales"}
    with pytest.raises(ModelError, match=rf"do not belong together in 4 bits and groups of {packing.group_size}"):
        dense(packing, scales=parts["scales"], **integers)
    assert dense(Packing("awq", 4, 8), scales=parts["scales"], **integers) == [[0.0] * 32] * 8


@pytest.mark.parametrize(("stored", "said"), [(4, 3), (4, 8), (8, 4), (3, 8), (8, 3), (4, 2)])
def test_other_bits_than_the_config_says(stored: int, said: int) -> None:
    parts = {
        "qweight": torch.zeros(128 * stored // 32, 64, dtype=torch.int32),
        "qzeros": torch.zeros(4, 64 * stored // 32, dtype=torch.int32),
        "scales": torch.ones(4, 64),
        "g_idx": torch.arange(128) // 32,
    }
    assert len(dense(Packing("gptq", stored, 32), **parts)) == 64
    with pytest.raises(ModelError, match=f"do not belong together in {said} bits"):
        dense(Packing("gptq", said, 32), **parts)


# Whole checkpoints


def pack(numbers_RX: np.ndarray, order: list[int]) -> torch.Tensor:
    """Eight nibbles of a row to a word; nibble i of it is number order[i]."""
    eights = numbers_RX.reshape(len(numbers_RX), -1, 8)[:, :, order].astype(np.uint32)
    packed = np.sum(eights << np.arange(0, 32, 4, dtype=np.uint32), axis=2, dtype=np.uint32)
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def quantized_checkpoint(source: str, folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Writes `source` in 4 bits, groups of 8 and random zeros, in a layout; the dense weights it stands for."""
    is_gptq = method != "awq"
    rng = np.random.default_rng(3)
    stored, meant = {}, {}
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = meant[name] = tensor
            continue
        outputs, features = tensor.shape
        groups = features // 8
        group_K = rng.permutation(features) // 8 if is_gptq else np.arange(features) // 8
        zeros_GN = rng.integers(5, 11, (groups, outputs))
        scales_GN = torch.from_numpy(rng.uniform(0.05, 0.1, (groups, outputs))).half()
        s_NK, z_NK = scales_GN.float().numpy()[group_K].T, zeros_GN[group_K].T
        q_NK = np.clip(np.round(tensor.numpy() / s_NK) + z_NK, 0, 15).astype(np.int64)
        meant[name] = torch.from_numpy(((q_NK - z_NK) * s_NK).astype(np.float32))
        module = name.removesuffix(".weight")
        if is_gptq:
            straight = list(range(8))
            stored[f"{module}.qweight"] = pack(q_NK, straight).T.contiguous()
            stored[f"{module}.qzeros"] = pack(zeros_GN - (method == "gptq"), straight)
            stored[f"{module}.g_idx"] = torch.from_numpy(group_K.astype(np.int32))
        else:
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            stored[f"{module}.qweight"] = pack(q_NK.T, order)
            stored[f"{module}.qzeros"] = pack(zeros_GN, order)
        stored[f"{module}.scales"] = scales_GN
    for path in Path(source).glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    layout = {"quant_method": "gptq", "checkpoint_format": method} if is_gptq else {"quant_method": "awq"}
    config["quantization_config"] = layout | {"bits": 4, "group_size": 8, "desc_act": is_gptq}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return meant


@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=["dense", "int8", "int4"]
)
def test_a_checkpoint_runs_as_the_dense_model_it_stands_for(
    model_folder: str, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    meant = quantized_checkpoint(model_folder, tmp_path, method)
    packed, expected = LLM(str(tmp_path), **options), LLM(model_folder, **options)
    expected.update_weights(meant.items(), version=1)
    for name, tensor in expected.engine.decoder.tensors.items():
        assert torch.equal(tensor, packed.engine.decoder.tensors[name]), name
    assert packed.weights_checksum() == expected.weights_checksum()
    sequence = np.arange(21)
    np.testing.assert_array_equal(packed.score([sequence])[0], expected.score([sequence])[0])


def test_groups_out_of_order_are_divided_among_ranks(model_folder: str, tmp_path: Path) -> None:
    """By rows and by columns, as the dense weights are: which group an input is of goes with it."""
    meant = quantized_checkpoint(model_folder, tmp_path, "gptq")
    divided, whole = LLM(str(tmp_path), tensor_parallel_size=2), LLM(model_folder)
    whole.update_weights(meant.items(), version=1)
    assert divided.weights_checksum() == whole.weights_checksum()
    sequence = np.arange(21)
    np.testing.assert_allclose(divided.score([sequence])[0], whole.score([sequence])[0], atol=1e-4)


def test_biases_of_zero_that_gptq_writes_everywhere(model_folder: str, tmp_path: Path) -> None:
    """Programs that make such checkpoints write them for models that have none; any other is a tensor too many."""
    quantized_checkpoint(model_folder, tmp_path, "gptq")
    stored = load_file(tmp_path / "model.safetensors")
    bias = "model.layers.1.mlp.down_proj.bias"
    save_file(stored | {bias: torch.zeros(32, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert LLM(str(tmp_path)).generate([[1, 2]])[0].error is None
    save_file(stored | {bias: torch.ones(32, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{bias}' is not part of this architecture"):
        LLM(str(tmp_path))
