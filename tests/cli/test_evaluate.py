"""`olmorl eval` as a user meets it, on the quickstart's model."""

import json
import shutil
from pathlib import Path

import pytest

from olmorl.cli.evaluate import smaller_ks
from olmorl.cli.main import run
from olmorl.config.dump import dump_toml
from olmorl.config.load import load_config
from olmorl.metrics.pass_at_k import avg_at_k, pass_at_k
from olmorl.metrics.rollout_log import read_rollouts

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = CONFIGS / "quickstart" / "model"
HELD_OUT = CONFIGS / "quickstart" / "held_out.jsonl"
SMALL = ("--limit", "6", "-k", "4", "--max-tokens", "60", "--threads", "1", "--kv-cache-tokens", "4096")


def test_a_model_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, samples = tmp_path / "figures.json", tmp_path / "samples.parquet"
    files = ["--json", str(figures), "--samples", str(samples)]
    assert run(["eval", "--model", str(MODEL), "--data", str(HELD_OUT), "--verifier", "gsm8k", *SMALL, *files]) == 0
    report = json.loads(figures.read_text())
    [(name, found)] = report["sets"].items()
    rows = read_rollouts(samples)
    by_prompt: dict[str, list[float]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt_id, []).append(row.reward or 0.0)
    rewards = list(by_prompt.values())
    assert [len(r) for r in rewards] == [4] * 6
    assert (name, report["version"], found["prompts"], found["k"], found["unscored"]) == ("held_out", 0, 6, 4, 0)
    assert (found["avg_at_k"], found["avg_at_k_stderr"]) == (
        pytest.approx(avg_at_k(rewards).mean),
        pytest.approx(avg_at_k(rewards).standard_error),
    )
    assert {k: e["mean"] for k, e in found["pass_at"].items()} == {
        str(k): pytest.approx(pass_at_k(rewards, k).mean) for k in (1, 2, 4)
    }
    out = capsys.readouterr().out
    assert "held_out: 6 prompts x 4 samples" in out and f"avg@4      {found['avg_at_k']:.4f} ± " in out
    row = rows[0]
    assert row.fate == "eval" and row.prompt and row.prompt.endswith("=") and json.loads(row.ground_truth or "")
    assert row.verdict_detail and row.data_source == "held_out" and row.version_spans == ((0, 0, len(row.token_ids)),)


def test_a_run_directory_is_evaluated_as_the_run_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its newest export, by its own config: sets, verifier, lengths; what the command says goes before."""
    weight = "reward.weights={max_length=0.5}"  # of rows that the run trained on, and none of these
    config = load_config(CONFIGS / "quickstart.toml", ["eval.limit=3", "inference.threads=1", weight])
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert run(["eval", str(tmp_path)]) == 2
    assert "holds no export" in capsys.readouterr().err
    for step in (4, 20):
        shutil.copytree(MODEL, tmp_path / "export" / f"step_{step:06d}")
    (tmp_path / "export" / "step_000100").mkdir()  # not written to its end
    figures = tmp_path / "figures.json"
    assert run(["eval", str(tmp_path), "--n", "2", "--json", str(figures)]) == 0
    report = json.loads(figures.read_text())
    assert (report["version"], Path(report["model"]).name) == (20, "step_000020")
    assert (report["sets"]["heldout"]["prompts"], report["sets"]["heldout"]["k"]) == (3, 2)


def test_bad_truths_are_told_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "three"}\n')
    assert run(["eval", str(MODEL), "--data", str(data), "--verifier", "gsm8k"]) == 2
    assert f"{data}:2: verifier 'gsm8k': the ground truth 'three' holds no number" in capsys.readouterr().err


@pytest.mark.parametrize(("k", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_the_ks_of_pass_at_k(k: int, ks: list[int]) -> None:
    assert smaller_ks(k) == ks


def test_a_verifier_that_fails_at_everything_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of nothing are no result; what was said is kept."""
    (tmp_path / "my_verifier.py").write_text("def score(completion, ground_truth, prompt):\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    files = ["--json", "figures.json", "--samples", "samples.parquet"]
    own = ["--verifier", "my_verifier:score", *SMALL, "--limit", "2"]
    assert run(["eval", "--model", str(MODEL), "--data", str(HELD_OUT), *own, *files]) == 1
    said = capsys.readouterr().err
    assert "all 8 samples of evaluation set 'held_out' ended in an error" in said and "ZeroDivisionError" in said
    assert json.loads((tmp_path / "figures.json").read_text())["sets"]["held_out"]["avg_at_k"] is None
    assert [row.verdict for row in read_rollouts(tmp_path / "samples.parquet")] == ["error"] * 8
