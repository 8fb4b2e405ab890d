"""What is read of a run directory: each line once, whole lines only, and nothing of a folder that is no run."""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from olmorl.cli.inspect import colours
from olmorl.cli.main import run as command
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import OBSERVED
from olmorl.dashboard.run_data import Growing, RunData
from olmorl.dashboard.samples import TokenTexts, ratios_of
from olmorl.metrics.rollout_log import read_rollouts, write_rollouts

Make = Callable[..., Path]


def test_a_growing_file_is_read_once_and_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = Growing(path)
    rows.refresh()
    assert list(rows.rows) == []
    path.write_text('{"a": 1}\n{"a": 2')
    rows.refresh()
    assert [row["a"] for row in rows.rows] == [1]
    with path.open("a") as file:
        file.write("2}\n")
    rows.refresh()
    assert [row["a"] for row in rows.rows] == [1, 22]
    path.write_text('{"a": 3}\n')  # a resumed run has cut it
    rows.refresh()
    assert [row["a"] for row in rows.rows] == [3]


def test_samples_are_those_of_the_rollouts(tmp_path: Path, make_run: Make) -> None:
    run = RunData(make_run(tmp_path / "run", steps=6, rollouts=2))
    samples = run.samples(5)
    assert run.rollout_steps() == [5, 6] and len(samples) == 2
    rows = read_rollouts(run.rollouts_file(6))
    assert samples[1].lengths.tolist() == [len(row.token_ids) for row in rows]
    assert samples[1].truncated.tolist() == [row.finish_reason == "length" for row in rows]
    trained = [row for row in rows if row.fate == "trained"]
    assert samples[1].lags.tolist() == np.bincount([5 - row.version_spans[0][0] for row in trained]).tolist()
    ages = [5 - version for row in trained for version, start, end in row.version_spans for _ in range(start, end)]
    assert samples[1].ages.tolist() == np.bincount(ages).tolist()


def test_what_an_environment_wrote_is_neither_long_nor_old(tmp_path: Path, make_run: Make) -> None:
    run = RunData(make_run(tmp_path / "run", steps=6, rollouts=1))
    row = read_rollouts(run.rollouts_file(6))[1]
    rows = [
        replace(row, token_ids=np.arange(9, dtype=np.int32), version_spans=((4, 0, 3), (OBSERVED, 3, 7), (5, 7, 9))),
        replace(row, token_ids=row.token_ids[:0], version_spans=(), finish_reason="abort", fate="aborted"),
    ]
    write_rollouts(run.rollouts_file(6), rows)
    [samples] = run.samples(1)
    assert (samples.lengths.tolist(), samples.lags.tolist(), samples.ages.tolist()) == ([5, 0], [0, 1], [2, 3])
    write_rollouts(run.rollouts_file(6), [])
    [samples] = run.samples(1)
    assert samples.lengths.tolist() == samples.lags.tolist() == samples.ages.tolist() == []


def test_the_timeline_holds_the_last_seconds(tmp_path: Path, make_run: Make) -> None:
    run = RunData(make_run(tmp_path / "run", steps=1))
    run.refresh()
    rows = run.timeline(9.5)
    assert {row["worker"] for row in rows} == {"inference-0", "inference-1", "learner"}
    assert max(row["t"] for row in rows) - min(row["t"] for row in rows) == 9
    for row in rows:
        assert sum(row["spent"].values()) == pytest.approx(row["span"], abs=2e-3)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        RunData(tmp_path)
    assert command(["dashboard", str(tmp_path / "nowhere")]) == 2
    assert command(["inspect", str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err


def test_inspect_prints_a_group_side_by_side(
    tmp_path: Path, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", steps=6, rollouts=2)
    assert command(["inspect", str(run), "--step", "5", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "0-5-0" in out and "0-5-1" in out and "0-5-2" not in out and "mean reward 0.500" in out and "#3" in out
    assert command(["inspect", str(run), "--prompt", "0-6-2", "--colour", "version"]) == 0
    assert "step 6 · 0-6-2" in capsys.readouterr().out
    assert command(["inspect", str(run), "--colour", "ratio", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert 'ground truth: "6"' in out and "<i>says</i> 6" in out and "0-6-0_3" in out
    assert command(["inspect", str(run), "--step", "77"]) == 2
    assert "no rollouts of step 77" in capsys.readouterr().err
    assert command(["inspect", str(run), "--prompt", "who"]) == 2


@pytest.mark.parametrize(
    ("config", "summary", "says"),
    [
        ("[logging]\nrollouts = false\n", {}, ": logging.rollouts = false in its config"),
        ("", {}, " yet: samples are written with the step that is trained next"),
        ("", {"exit_reason": "failed: no"}, ": it ended before a step was trained (failed: no). Samples of its eval"),
    ],
)
def test_inspect_says_why_there_are_no_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, summary: dict[str, str], says: str
) -> None:
    (tmp_path / "config.toml").write_text(config)
    if summary:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        (tmp_path / "evals").mkdir()
        (tmp_path / "evals" / "step_000000.parquet").touch()
    assert command(["inspect", str(tmp_path)]) == 2
    assert f"has no rollouts{says}" in capsys.readouterr().err


def test_inspect_shows_evaluations_apart(tmp_path: Path, make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(make_run(tmp_path / "run", steps=6))
    assert command(["inspect", run, "--eval"]) == 0
    out = capsys.readouterr().out
    assert "evaluation of version 6 · heldout/0_0" in out and "heldout/0_1_0" in out and "0-6-0" not in out
    assert command(["inspect", run, "--eval", "--prompt", "heldout/0_1"]) == 0
    out = capsys.readouterr().out
    assert [f"evaluation of version {version} · heldout/0_1" in out for version in (0, 6)] == [True, True]
    for wrong, told in (
        (["--eval", "--step", "3"], "no evaluations of step 3; there are steps 0, 6"),
        (["--prompt", "heldout/0_1"], "those of evaluations are shown with --eval"),
    ):
        assert command(["inspect", run, *wrong]) == 2
        assert told in " ".join(capsys.readouterr().err.split())


def test_no_terminal_obeys_what_a_model_wrote(
    tmp_path: Path, make_run: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it markup."""
    run = RunData(make_run(tmp_path / "run", steps=1))
    orders = "\x1b]0;mine\x07\x9b2J\r\x7f"
    row = replace(read_rollouts(run.rollouts_file(1))[0], data_source="[/red]" + orders, verdict_detail=orders)
    write_rollouts(run.rollouts_file(1), [replace(row, ground_truth=orders)])
    monkeypatch.setattr(TokenTexts, "pieces", lambda self, ids: [orders for _ in ids])
    monkeypatch.setattr(TokenTexts, "text", lambda self, ids: orders)
    assert command(["inspect", str(run.directory)]) == 0
    out = capsys.readouterr().out
    assert "[/red]␛]0;mine␇" in out and not {
        char for char in out if char != "\n" and unicodedata.category(char) == "Cc"
    }


@pytest.mark.parametrize("width", [40, 80, 160])
def test_inspect_cuts_no_fact_off(
    tmp_path: Path, make_run: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run = RunData(make_run(tmp_path / "run", steps=1))
    assert command(["inspect", str(run.directory), "--limit", "1"]) == 0
    words = capsys.readouterr().out.replace("│", " ").split()
    samples = [row for row in read_rollouts(run.rollouts_file(1)) if row.prompt_id == "0-1-0"]
    assert words.count("tokens") == len(samples) == 4 and words.count("advantage") == 3


def test_a_token_has_the_ratio_that_the_learner_gave_it(tmp_path: Path, make_run: Make) -> None:
    rows = {row.rollout_id: row for row in read_rollouts(RunData(make_run(tmp_path / "run", steps=2)).rollouts_file(2))}
    trained, untrained = rows["0-2-0_0"], rows["0-2-0_3"]
    assert ratios_of(trained) == pytest.approx(np.exp(trained.learner_logprobs - trained.logprobs).tolist(), abs=1e-4)
    assert ratios_of(untrained) == [None] * len(untrained.token_ids)
    sample = {"ratios": [None, 0.1, 0.6, 0.9, 1.0, 1.1, 1.5, 3.0]}
    shades = [colours("ratio")(sample, at) for at in range(8)]
    assert len(set(shades)) == 8 and shades[0] == "dim" and shades[4] == ""


def test_what_the_server_says_is_json_without_a_template(tmp_path: Path, make_run: Make) -> None:
    from starlette.testclient import TestClient

    from olmorl.dashboard.server import dashboard_app

    client = TestClient(dashboard_app([make_run(tmp_path / "run", steps=3)]))
    said = json.loads(client.get("/charts").text)
    assert said["runs"] == [{"name": "run", "status": "finished", "step": 3, "unreadable": []}]
    assert {"name": "learner waits", "value": "75%"} in said["tiles"]
    assert all("template" not in chart["figure"]["layout"] for chart in said["charts"])
    group = client.get("/rollouts", params={"step": 3, "prompt": "0-3-0"}).json()
    assert group["samples"][0]["tokens"][0].startswith("⟨")
    assert client.get("/rollouts?step=9").status_code == 404 and client.get("/rollouts?step=x").status_code == 400
    assert "default-src 'none'" in client.get("/").headers["content-security-policy"]
