"""`olmorl plan` as it is called: a table, a JSON with the promised keys, a page, and words for what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from olmorl.cli.main import run as command
from olmorl.config.load import load_config
from olmorl.planner.plan import candidates
from olmorl.planner.question import question_of

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


def test_every_split_that_was_tried_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*SMALL, "--gpus", "8", "--json", str(tmp_path / "plan.json"))
    assert command(["plan", *asked]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    question = question_of(load_config(*_parsed(SMALL)), num_devices=8, device_name="h100", shape="qwen2.5-7b")

    def split(plan: dict[str, Any]) -> tuple[int, int, int]:
        return plan["inference_gpus"], plan["tensor_parallel"], plan["slots"]

    tried = found["tried"]
    assert sorted(map(split, tried)) == sorted(candidates(question)) and len(tried) > 6
    assert {split(plan) for plan in tried if plan["dropped"] is None} == set(map(split, found["plans"]))
    rates = [plan["trained_tokens_per_second"] for plan in tried]
    assert rates == sorted(rates, reverse=True)
    told = f"it trains {rates[-1]:,.0f} tokens/s and the last finalist {rates[5]:,.0f}"
    assert told in tried[-1]["dropped"] and not any(plan["dropped"] for plan in tried[:6])


def _parsed(asked: tuple[str, ...]) -> tuple[Path, list[str]]:
    return Path(asked[0]), [word for word in asked[1:] if not word.startswith("--")]


def test_a_price_is_told_and_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of a measured device too, which is the price of --device."""
    profile = [[tokens, 1.5e10 * tokens, 0.01 + 0.0001 * tokens] for tokens in range(1, 33)]
    bench = tmp_path / "engine.json"
    bench.write_text(json.dumps({"profile": profile, "peak_tflops": 900, "peak_gbs": 3000}))
    asked = ("plan", *SMALL, "--as-given", "--bench", str(bench), "--json", str(tmp_path / "plan.json"))
    found = []
    for price, told in (
        ((), "a device at $3.2 an hour, a round price of h200 (--price-per-hour)"),
        (("--price-per-hour", "0.8"), "a device at $0.8 an hour"),
    ):
        assert command([*asked, "--device", "h200", *price]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert told in said and "on 2 measured h200" in said and f"dollars_per_hour {told[13:16]}" in said
        assert ("round price" in said) == (not price)
        found.append(json.loads((tmp_path / "plan.json").read_text()))
    given, own = (one["best"]["cost_per_million_trained_tokens"] for one in found)
    assert given == pytest.approx(4 * own) and found[1]["factors"]["dollars_per_hour"] == 0.8


ROW = {"progress/step": 3, "time/step": 1.0, "learner_time/waiting": 0.5, "learner_time/training": 0.5,
       "learner_time/sending": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "metrics", "told"),
    [
        (False, None, "--check RUN is no run directory: it has no config.toml"),
        (True, None, "the run RUN has nothing to measure: metrics.jsonl cannot be read: No such file"),
        (True, "", "0 steps are in metrics.jsonl, and the first 2 fill the pipeline; let it run for longer"),
        (True, '{"progress/step": 2}\n{"progress/ste', "1 steps are in metrics.jsonl, and the first 2 fill"),
        (True, '{"progress/step": 3}\n', "the row of step 3 lacks time/step, throughput/trained_tokens_per_second"),
        (True, '{"progress/step": 1}\n{"prog\n', "metrics.jsonl, line 2: no JSON"),
        (True, "[3]\n", "metrics.jsonl, line 1: no row of metrics"),
        (True, json.dumps(ROW | {"throughput/trained_tokens_per_second": 0.0}) + "\n", "no token was trained in the 1"),
    ],
)
def test_a_folder_that_is_no_run_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: bool, metrics: str | None, told: str
) -> None:
    run, bench = tmp_path / "RUN", tmp_path / "bench.json"
    run.mkdir()
    bench.write_text("{}")
    if config:
        (run / "config.toml").write_text('model.path = "Qwen/Qwen3-8B"\ndata.train = "x.jsonl"\n')
    if metrics is not None:
        (run / "metrics.jsonl").write_text(metrics)
    assert command(["plan", "--check", str(run), "--bench", str(bench), "--learner-bench", str(bench)]) == 2
    assert told in " ".join(capsys.readouterr().err.replace(f"{run}/", "").replace(str(run), "RUN").split())


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
