"""`olmorl quantize` on a small model: a checkpoint that loads, here and where transformers reads its config."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.quantizers import AutoQuantizationConfig

from inference import LLM
from olmorl.cli.main import run

CHARACTERS = "0123456789+=abcdefghijklmno"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=len(CHARACTERS),
        initializer_range=0.2, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {character: index for index, character in enumerate([*CHARACTERS, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    chance = random.Random(0)
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": "".join(chance.choices(CHARACTERS, k=chance.randint(5, 30)))} for _ in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("flags", [("gptq", "4"), ("gptq", "3", "--desc-act"), ("awq", "4")], ids="-".join)
def test_a_checkpoint(model: str, prompts: str, tmp_path: Path, capsys: Any, flags: tuple[str, ...]) -> None:
    method, bits, *more = flags
    out, report = tmp_path / "out", tmp_path / "new" / "report.json"
    command = ["quantize", "--model", model, "--prompts", prompts, "--out", str(out), "--json", str(report)]
    assert run([*command, "--method", method, "--bits", bits, "--group-size", "32", "--max-tokens", "20", *more]) == 0
    found = json.loads(report.read_text())
    assert len(found["matrices"]) == 2 * 4 and found["bytes"] < found["dense_bytes"] * 0.5
    assert found["dense_bytes"] == sum(t.nbytes for t in load_file(Path(model) / "model.safetensors").values())
    said = capsys.readouterr().out
    assert "16 prompts; up to 20 tokens are sampled behind each" in said
    assert said.count(" left\n") == 2 * 4 and " · 0:00 left\n" in said
    (tmp_path / "plain").touch()
    assert (out / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
    errors = [sum(matrix[name] for matrix in found["matrices"]) for name in ("error", "nearest_error")]
    assert 0 < errors[0] < errors[1]
    assert found["dense_perplexity"] != found["perplexity"] < 3 * found["dense_perplexity"]

    config = AutoConfig.from_pretrained(out)
    read = AutoQuantizationConfig.from_dict(config.quantization_config)
    assert (read.quant_method.value, read.bits, read.group_size) == (method, int(bits), 32)
    stored = load_file(out / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items() if "layers.1.mlp.down_proj" in name}
    words, rows = (96 * int(bits) // 32, 64) if method == "gptq" else (96, 64 // 8)
    assert shapes.pop("model.layers.1.mlp.down_proj.qweight") == (words, rows)
    assert shapes.pop("model.layers.1.mlp.down_proj.qzeros") == (3, 64 * int(bits) // 32)
    assert shapes.pop("model.layers.1.mlp.down_proj.scales") == (3, 64)
    assert shapes == ({"model.layers.1.mlp.down_proj.g_idx": (96,)} if method == "gptq" else {})

    sequence = np.arange(20)
    lost = np.abs(LLM(out).score([sequence])[0] - LLM(model).score([sequence])[0])
    assert 1e-4 < lost.mean() < 1.5
    assert LLM(out).generate(["1+2="])[0].samples[0].token_ids


@pytest.mark.soak
@pytest.mark.parametrize("flags", [("gptq", "4", "--desc-act"), ("gptq", "8"), ("awq", "4")], ids="-".join)
def test_transformers_computes_the_same_of_it(model: str, prompts: str, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Where it can load it at all. It rounds the dense weights to float16, so for once we do too."""
    pytest.importorskip("gptqmodel", reason="transformers loads no GPTQ or AWQ checkpoint without it")
    method, bits, *more = flags
    command = ["quantize", "--model", model, "--prompts", prompts, "--out", str(tmp_path), "--max-tokens", "0"]
    assert run([*command, "--method", method, "--bits", bits, *more]) == 0
    sequence = np.arange(20)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map="cpu").eval()
    assert not [name for name, _ in theirs.named_parameters() if name.endswith("proj.weight")], "it holds packed words"
    with torch.no_grad():
        logprobs = theirs(torch.from_numpy(sequence[None])).logits[0, :-1].float().log_softmax(-1)
    ours = LLM(tmp_path)
    rounded = {
        name: tensor.half().float() if name.endswith("proj.weight") else tensor.clone()
        for name, tensor in ours.engine.decoder.tensors.items()
    }
    ours.update_weights(rounded, version=1)
    expected = logprobs.gather(1, torch.from_numpy(sequence[1:, None]))[:, 0]
    np.testing.assert_allclose(ours.score([sequence])[0], expected, atol=1e-4)


def test_widths_side_by_side(model: str, prompts: str, tmp_path: Path, capsys: Any) -> None:
    out, report, plot = tmp_path / "out", tmp_path / "report.json", tmp_path / "plot.html"
    command = ["quantize", "--model", model, "--prompts", prompts, "--out", str(out)]
    assert run([*command, "--max-tokens", "0", "--widths", "8,3", "--json", str(report), "--plot", str(plot)]) == 0
    found = json.loads(report.read_text())
    rows = {(row["bits"], row["method"]): row for row in found["widths"]}
    assert list(rows) == [(bits, method) for bits in (8, 3) for method in ("nearest", "gptq", "awq")]
    for method in ("nearest", "gptq", "awq"):
        wide, narrow = rows[8, method], rows[3, method]
        assert wide["error"] < narrow["error"] / 10 and wide["size_bytes"] > narrow["size_bytes"]
        assert wide["perplexity"] == pytest.approx(found["dense_perplexity"], rel=0.02)
        assert (wide["computed_as"], narrow["computed_as"]) == ("int8", "dense float32")
        assert wide["tokens_per_second"] > 0
    assert rows[3, "gptq"]["error"] < rows[3, "nearest"]["error"]
    assert "plotly" in plot.read_text()[:10_000] and "8 bits" in plot.read_text()
    said = capsys.readouterr().out
    assert "awq" in said and "groups of 32 inputs" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--method", "nf4"), "--method is 'nf4'; it must be gptq or awq"),
        (("--widths", "8,9"), "--widths is '8,9'; it must be numbers of bits from 2 to 8"),
        (("--plot", "x.html"), "give --widths too"),
        (("--method", "awq", "--bits", "3"), "AWQ checkpoints have 4 bits"),
        (("--limit", "2"), "gives 2 sequences of two tokens or more"),
        (("--group-size", "128"), "group_size is 128, which does not divide the 64 inputs"),
        (("--out", __file__), "is no empty folder; give another --out"),
    ],
)
def test_wrong_settings_are_named(
    model: str, prompts: str, tmp_path: Path, capsys: Any, flags: tuple[str, ...], message: str
) -> None:
    command = ["quantize", "--model", model, "--prompts", prompts, "--out", str(tmp_path / "out"), "--max-tokens", "0"]
    assert run([*command, *flags]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
