"""`olmorl plan` as it is called: a table, a JSON with the promised keys, a page, and words for what cannot be."""

import json
from pathlib import Path

import pytest

from olmorl.cli.main import run as command

ROOT = Path(__file__).parents[2]
SMALL = (
    str(ROOT / "configs" / "gsm8k.toml"),
    "rollout.max_prompt_tokens=512",
    "rollout.max_response_tokens=512",
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=4",
    "--shape=qwen2.5-7b",
)
KEYS = {
    "inference_gpus",
    "learner_gpus",
    "tensor_parallel",
    "slots",
    "tokens_per_second",
    "step_seconds",
    "learner_wait_share",
    "staleness_mean",
    "staleness_max",
    "preemption_share",
    "stall_seconds",
    "cost_per_million_trained_tokens",
}


def test_a_plan_is_a_table_a_file_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert command(["plan", *SMALL, "--gpus", "4", "--json", str(where), "--plot", str(page)]) == 0
    said = capsys.readouterr().out
    found = json.loads(where.read_text())
    best = found["best"]
    assert best == found["plans"][0] and best.keys() >= KEYS
    assert best["inference_gpus"] + best["learner_gpus"] == 4
    assert found["command"] in said and "compute_efficiency 0.6" in " ".join(said.split())
    rates = [plan["trained_tokens_per_second"] for plan in found["plans"]]
    assert rates == sorted(rates, reverse=True) and len(rates) > 1
    assert f"inference.workers={best['inference_gpus'] // best['tensor_parallel']}" in said
    assert found["factors"]["bandwidth_efficiency"] == 0.75 and len(found["sensitivity"]) == 4
    assert "devices that generate" in page.read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpus", "1"], "splits at least 2 devices"),
        (["--gpus", "2"], "2 h100 are too few for qwen2.5-7b: training it takes at least"),
        (["--device", "h1000"], "there are a100, h100, h200, b200"),
        (["--shape", "gpt-9"], "no shape known by name; those are smollm2-135m, qwen2.5-7b"),
        (["--mean-length", "0"], "is not between 1 and the longest"),
        (["--mean-length", "9999"], "is not between 1 and the longest"),
        (["--lengths", "nowhere.json"], "is no JSON list of lengths"),
    ],
)
def test_what_cannot_be_planned_is_said(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", *SMALL, *options]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
