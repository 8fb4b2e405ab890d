"""`olmorl bench sync` on a small model, with real workers: the figures it must have, and that they add up."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from olmorl.cli.main import run

MODES = {"seconds", "gb_per_second", "stall_seconds", "stall_steps", "lost_seconds", "tokens_per_second"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, eos_token_id=3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_an_update_in_each_mode_under_load(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--live", "4", "--max-tokens", "16", "--seconds", "1", "--interval", "0.5"]
    assert run(["bench", "sync", "--model", model, "--json", str(out), *sizes, "sync.bucket_mb=1"]) == 0
    figures = json.loads(out.read_text())
    parameters = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(model).parameters())
    assert 4 * parameters <= figures["bytes"] < 5 * parameters and figures["decode_step_seconds"] > 0
    assert set(figures["modes"]) == {"inflight", "pause", "drain"} and figures["transport"] == "gloo"
    for figure in figures["modes"].values():
        assert set(figure) >= MODES and figure["tokens_per_second"] > 0
        assert 0 < figure["stall_seconds"] <= figure["stall_seconds_max"]
        assert figure["stall_steps"] == pytest.approx(figure["stall_seconds"] / figures["decode_step_seconds"])
        assert figure["gb_per_second"] == pytest.approx(figures["bytes"] / figure["seconds"] / 1e9)
        assert figure["tokens_share"] > 0 and figure["snapshot_seconds"] > 0
    inflight = figures["modes"]["inflight"]
    assert inflight["tokens_per_second"] == pytest.approx(
        inflight["tokens_share"] * figures["tokens_per_second_without"]
    )
    assert figures["modes"]["inflight"]["updates"] == 2
    assert figures["modes"]["pause"]["stall_seconds"] > 0 and figures["modes"]["drain"]["stall_seconds"] > 0
