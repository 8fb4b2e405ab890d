"""`olmorl bench learner`: the figures it promises, and what it says of a bad batch."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from olmorl.cli.main import run

ENTRY = {"prompt": [3, 4, 5], "tokens": [6, 7], "advantage": 1.0, "logprobs": [-1.0, -2.0]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def bench(model: str, tmp_path: Path, batch: object) -> int:
    (tmp_path / "batch.json").write_text(json.dumps(batch))
    files = ["--batch", str(tmp_path / "batch.json"), "--json", str(tmp_path / "out.json")]
    return run(["bench", "learner", "--model", model, *files, "--steps", "2", "--threads", "1"])


def test_the_figures(model: str, tmp_path: Path) -> None:
    other = {**ENTRY, "prompt": [9, 8], "advantage": -0.5}
    assert bench(model, tmp_path, [ENTRY, {**ENTRY, "advantage": -1.0}, other]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["tokens"] == 14 and figures["tokens_computed"] == 11, "two samples share a prompt of three tokens"
    assert figures["tokens_per_second"] == pytest.approx(14 / figures["seconds"])
    assert 0 < figures["mfu"] < 1 and figures["peak_bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ([], "not an empty one"),
        ([ENTRY, {"prompt": [1], "tokens": [2]}], "entry 1 lacks advantage, logprobs"),
        ([{**ENTRY, "logprobs": [-1.0]}], "2 tokens and 1 logprobs"),
        ([{**ENTRY, "tokens": ["six", 7]}], "entry 0 holds what is no number"),
    ],
)
def test_a_bad_batch(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: object, complaint: str
) -> None:
    assert bench(model, tmp_path, batch) == 2
    assert complaint in capsys.readouterr().err
