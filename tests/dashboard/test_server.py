"""What the page's server answers: on damaged files, on directories that go away, on questions of any kind."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs
from starlette.testclient import TestClient

from olmorl.dashboard.plotly_script import only_drawn, page_script
from olmorl.dashboard.server import dashboard_app
from olmorl.metrics.rollout_log import read_rollouts, write_rollouts

Make = Callable[..., Path]


def charts(client: TestClient) -> dict[str, Any]:
    response = client.get("/charts")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def points(found: dict[str, Any], chart: str) -> int:
    [figure] = [c["figure"] for c in found["charts"] if c["id"] == chart]
    return max((len(trace["x"]) for trace in figure["data"]), default=0)


def break_line(run: Path) -> None:
    """As a disk leaves it that was full for a while."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:2], lines[2][:50] + lines[3], *lines[4:]]))


def cut(name: str, length: int) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:length])


@pytest.mark.parametrize(
    ("damage", "steps", "told"),
    [
        (break_line, 4, ["1 lines of metrics.jsonl"]),
        (cut("summary.json", 9), 6, ["summary.json"]),
        (cut("rollouts/step_000005.parquet", 0), 6, ["rollouts/step_000005.parquet"]),
        (cut("rollouts/step_000005.parquet", 99), 6, ["rollouts/step_000005.parquet"]),
        (lambda run: (run / "rollouts" / "step_copy.parquet").touch(), 6, []),
        (lambda run: shutil.rmtree(run / "rollouts"), 6, []),
    ],
)
def test_damage_costs_what_it_hit_and_is_named(
    damage: Callable[[Path], object], steps: int, told: list[str], tmp_path: Path, make_run: Make
) -> None:
    run = make_run(tmp_path / "run", steps=6)
    damage(run)
    client = TestClient(dashboard_app([run]))
    for _ in range(2):
        found = charts(client)
        assert points(found, "reward") == steps and found["runs"][0]["unreadable"] == told
        (run / "metrics.jsonl").touch()
    if "rollouts/step_000005.parquet" in told:
        response = client.get("/rollouts?step=5")
        assert response.status_code == 500 and "cannot be read" in response.text


@pytest.mark.parametrize("gone", [shutil.rmtree, lambda run: run.rename(run.with_name("elsewhere"))])
def test_what_was_read_stays_when_the_directory_goes(
    gone: Callable[[Path], object], tmp_path: Path, make_run: Make
) -> None:
    run = make_run(tmp_path / "run", steps=6)
    client = TestClient(dashboard_app([run]))
    assert charts(client)["runs"][0]["status"] == "finished"
    gone(run)
    found = charts(client)
    assert (
        found["runs"][0]["status"] == "gone"
        and points(found, "reward") == 6
        and found["steps"] == {"rollouts": [], "evals": []}
    )
    assert client.get("/rollouts?step=5").status_code == 404


def test_runs_of_one_name_are_told_apart(tmp_path: Path, make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / where / "run", steps=2) for where in ("old", "new")]
    assert [run["name"] for run in charts(TestClient(dashboard_app(runs)))["runs"]] == ["old/run", "new/run"]
    assert [run["name"] for run in charts(TestClient(dashboard_app(runs[:1] * 2)))["runs"]] == ["run", "run"]
    monkeypatch.chdir(runs[0])
    assert charts(TestClient(dashboard_app([Path()])))["runs"][0]["name"] == "run"


def test_a_group_is_asked_for_by_its_prompt(tmp_path: Path, make_run: Make) -> None:
    client = TestClient(dashboard_app([make_run(tmp_path / "run", steps=6)]))
    groups = client.get("/rollouts?step=5").json()
    assert [(g["prompt_id"], g["num_samples"], g["mean_reward"]) for g in groups] == [
        (f"0-5-{prompt}", 4, 0.5) for prompt in range(3)
    ]
    group = client.get("/rollouts", params={"step": 5, "prompt": "0-5-1"}).json()
    assert [sample["sample"] for sample in group["samples"]] == [0, 1, 2, 3]
    for query, status in (("step=5&prompt=who", 404), ("step=77", 404), ("step=x", 400), ("", 400)):
        assert client.get(f"/rollouts?{query}").status_code == status


def test_evaluations_are_read_beside_steps(tmp_path: Path, make_run: Make) -> None:
    client = TestClient(dashboard_app([make_run(tmp_path / "run", steps=6)]))
    assert charts(client)["steps"] == {"rollouts": [4, 5, 6], "evals": [0, 6]}
    groups = client.get("/rollouts?step=0&of=evals").json()
    assert [group["prompt_id"] for group in groups] == ["heldout/0_0", "heldout/0_1"]
    asked = {"step": 0, "of": "evals", "prompt": "heldout/0_1"}
    [sample] = client.get("/rollouts", params=asked).json()["samples"]
    assert sample["fate"] == "eval" and set(sample["versions"]) == {0}
    assert client.get("/rollouts?step=5&of=evals").status_code == 404


def test_plotly_comes_without_what_is_never_drawn_and_whole_where_that_is_in_doubt() -> None:
    whole = get_plotlyjs()
    [listed] = re.findall(r"\.register\(\[([\w$(),]+)\]\)", only_drawn(whole))
    assert listed.endswith("()") and "," not in listed and f"[{listed}," in whole, "not one of those listed"
    for strange in (
        "",
        whole.replace('moduleType:"trace",name:"bar"', 'moduleType:"trace",name:"other"'),
        whole.replace(".register([", ".add(["),
        whole + "x.register([a(),b()])",
    ):
        assert only_drawn(strange) == strange


def test_the_script_is_packed_for_who_unpacks_it(tmp_path: Path, make_run: Make) -> None:
    with TestClient(dashboard_app([make_run(tmp_path / "run", steps=2)])) as client:
        packed = client.get("/plotly.js")
        assert packed.headers["content-encoding"] == "gzip" and packed.text == page_script()
        plain = client.get("/plotly.js", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers and plain.text == packed.text
        assert (
            "max-age" in packed.headers["cache-control"] and "default-src" in packed.headers["content-security-policy"]
        )


def test_steps_without_a_token_leave_no_hole(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "run", steps=5)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2] |= {name: 0.0 for name in lines[2] if name.startswith("waste/")}
    lines[1]["canary/logprob_abs_diff_mean"] = 0.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {chart["id"]: chart["figure"] for chart in charts(TestClient(dashboard_app([run])))["charts"]}
    assert {tuple(trace["x"]) for trace in found["waste"]["data"]} == {(1, 2, 4, 5)}
    [canary] = [trace for trace in found["mismatch"]["data"] if trace["name"] == "canary"]
    assert canary["y"] == [0.5, None, 0.5, 0.5, 0.5], "a logarithm has no place for 0"


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "run", steps=2)
    path = run / "rollouts" / "step_000002.parquet"
    first, *others = read_rollouts(path)
    strange = np.full(len(first.token_ids), -np.inf, np.float32)
    write_rollouts(path, [replace(first, logprobs=strange), *others])
    group = TestClient(dashboard_app([run])).get("/rollouts", params={"step": 2, "prompt": first.prompt_id}).json()
    assert set(group["samples"][0]["logprobs"]) == {None}


def test_the_bars_of_many_workers_are_few_and_lose_no_second(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "run", steps=1)
    spent = {"decode": 0.75, "waiting": 0.25}
    names = [*(f"inference-{number}" for number in range(12)), "learner"]
    rows = [{"t": 1e9 + t, "span": 1.0, "worker": name, "spent": spent} for t in range(300) for name in names]
    (run / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [figure] = [c["figure"] for c in charts(TestClient(dashboard_app([run])))["charts"] if c["id"] == "timeline"]
    assert figure["layout"]["yaxis"]["categoryarray"][::-1] == names
    seconds = {trace["name"]: sum(trace["x"]) / 1e3 for trace in figure["data"]}
    assert seconds == {"decode": pytest.approx(13 * 300 * 0.75), "waiting": pytest.approx(13 * 300 * 0.25)}
    assert sum(len(trace["x"]) for trace in figure["data"]) <= 13 * 100 * len(spent)
