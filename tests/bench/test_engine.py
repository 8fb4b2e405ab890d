"""`olmorl bench engine` on a small model: the figures it must have, and that they add up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from olmorl.cli.main import run

KEYS = {
    "output_tokens", "seconds", "tokens_per_second", "prefill_tokens_computed", "prefill_tokens_shared",
    "mean_live_batch", "slot_waste", "steps", "mfu", "mbu", "peak_gbs", "peak_tflops", "preemptions",
}  # fmt: skip
LOAD = [
    {"prompt": [5, 6, 7, 8, 9], "max_tokens": 9, "group": 0},
    {"prompt": [5, 6, 7, 8, 9], "max_tokens": 2, "group": 0},
    {"prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "group": 0},
    {"prompt": [1, 2, 3], "max_tokens": 1, "group": 7},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("model"), vocab_size=40)


def random_model(folder: Path, *, vocab_size: int) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, eos_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def bench(model: str, folder: Path, *flags: str, load: list[dict[str, Any]] = LOAD) -> dict[str, Any]:
    (folder / "load.json").write_text(json.dumps(load))
    out = folder / "out.json"
    command = ["bench", "engine", "--model", model, "--workload", str(folder / "load.json"), "--json", str(out)]
    assert run([*command, "--threads", "1", "--kv-cache-tokens", "512", *flags]) == 0
    return json.loads(out.read_text())


def test_continuous(model: str, tmp_path: Path) -> None:
    out = bench(model, tmp_path)
    assert set(out) >= KEYS
    assert out["output_tokens"] == 9 + 2 + 4 + 1
    assert (out["prefill_tokens_computed"], out["prefill_tokens_shared"]) == (5 + 3, 2 * 5)
    assert out["steps"] == 9 == out["decode_steps"] + out["prefill_steps"]
    assert out["mean_live_batch"] == pytest.approx(16 / 9)
    assert out["slot_waste"] == 0 and out["preemptions"] == 0
    assert 0 < out["mfu"] < 1 and 0 < out["mbu"] < 1 and out["peak_gbs"] > 0 and out["peak_tflops"] > 0
    assert out["tokens_per_second"] == pytest.approx(out["output_tokens"] / out["seconds"])
    by_hand = 2 * (4 * 32 * 32 + 3 * 32 * 48) + 40 * 32
    assert (out["active_parameters"], out["quantization"], out["tensor_parallel_size"]) == (by_hand, None, 1)


def test_static_wastes_the_slots_of_short_samples(model: str, tmp_path: Path) -> None:
    out = bench(model, tmp_path, "--batching", "static", "--max-num-seqs", "4", "--deterministic")
    assert out["output_tokens"] == 16
    assert out["slot_waste"] == pytest.approx(1 - 16 / 36)


def test_as_reported_is_of_one_device(model: str, tmp_path: Path) -> None:
    out = bench(model, tmp_path, "--tensor-parallel-size", "2", "--as-reported")
    assert out["peak_source"].startswith("2 times ") and out["output_tokens"] == 16
    assert out["mbu_as_reported"] == pytest.approx(out["tokens_per_second"] / 2 * 3.926e9 / 3.35e12)


def test_with_guesses_the_same_tokens_take_fewer_steps(model: str, tmp_path: Path) -> None:
    """The model is a fair guess at itself: one seed a group, so that both draw the same."""
    out = bench(model, tmp_path, "--speculative", "model", "--draft-model", model, "--speculative-tokens", "3")
    assert out["output_tokens"] == 16 and out["steps"] < 9
    assert out["draft_acceptance"] == 1 and 1 < out["tokens_per_verification"] <= 4
    assert out["drafted_tokens"] == out["accepted_tokens"] > 0


def test_guesses_from_what_was_said_up_to_a_measured_number_of_tokens(tmp_path: Path) -> None:
    """Of four tokens something was said before wherever one looks."""
    model = random_model(tmp_path / "model", vocab_size=4)
    load = [{"prompt": [0, 1, 2, 0, 1], "max_tokens": 59, "group": group} for group in (0, 0, 1)]
    out = bench(model, tmp_path, "--speculative", "suffix", load=load)
    assert out["output_tokens"] == 3 * 59 and out["speculative_step_tokens"] == 16
    measured = bench(model, tmp_path, "--speculative", "suffix", "--speculative-step-tokens", "0", load=load)
    assert measured["speculative_step_tokens"] in (1, 2, 4, 8, 16, 32, 64) and measured["output_tokens"] == 3 * 59


@pytest.mark.parametrize(
    ("load", "complaint"),
    [
        (None, "a list of entries"),
        ([], "not an empty one"),
        ([LOAD[0], {"prompt": [1], "max_tokens": 2}], "entry 1 lacks 'group'; an entry has prompt, max_tokens, group"),
        ([LOAD[0] | {"prompt": "hello"}], "entry 0: prompt is 'hello'; it must be a list of token ids"),
        ([LOAD[0] | {"prompt": []}], "entry 0: prompt is []"),
        ([LOAD[0] | {"max_tokens": 0}], "entry 0: max_tokens is 0; it must be a whole number above 0"),
        ([LOAD[0], LOAD[3] | {"group": 0}], "entry 1 has another prompt"),
        ([LOAD[0], LOAD[3] | {"prompt": [1, 40]}], "group 2 of 2: token id 40 is outside the vocabulary [0, 40)"),
    ],
)
def test_a_bad_load_says_what_is_wrong_with_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], load: object, complaint: str
) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps(load))
    assert run(["bench", "engine", "--model", model, "--workload", str(path), "--threads", "1"]) == 2
    assert complaint in capsys.readouterr().err


def test_no_load() -> None:
    assert run(["bench", "engine", "--model", "x", "--workload", "missing.json"]) == 2
