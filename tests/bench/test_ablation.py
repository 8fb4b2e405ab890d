"""`olmorl bench ablation`: a row of it on the real system, at the smallest size; the whole command is soak."""

import json
from pathlib import Path

import pytest

from olmorl.bench.ablation import DEFAULT, QUICK, Row, bench_ablation, measure, switches, to_rows
from olmorl.bench.drawn_load import write_rows
from olmorl.cli.main import run
from olmorl.config.load import load_config
from olmorl.contract.errors import ConfigError
from olmorl.metrics.run_figures import RunFigures
from olmorl.planner.load import Load, lognormal_lengths
from olmorl.planner.recorded import recorded_load

COLUMNS = {
    "name", "tokens_per_second", "trained_tokens_per_second", "mfu", "mbu", "slot_waste", "learner_wait_share",
    "stall_seconds", "step_gain", "cumulative_gain", "repeats",
}  # fmt: skip


@pytest.mark.soak
def test_a_row_serves_the_load_that_was_drawn(tmp_path: Path) -> None:
    """Lengths, order and signal of a real run are those of the draw: a simulation of the draw is one of the run."""
    QUICK.write(tmp_path)
    settings = [
        *QUICK.settings(tmp_path), f"run.output_dir={tmp_path}", "run.name=row", *switches(2)[0].settings,
        "inference.threads=1", "learner.threads=1", "logging.console=false", "logging.wandb=disabled",
        "rollout.oversampling=2", "run.steps=1000",
    ]  # fmt: skip
    config = load_config(None, settings)
    figures = measure(config, QUICK)
    found, drawn = recorded_load(tmp_path / "row"), QUICK.drawn()
    assert len(found.groups) >= 8
    for number, (lengths, has_signal) in enumerate(found.groups):
        wanted, signal = drawn.group(number, QUICK.samples_per_prompt, seed=QUICK.seed)
        assert (lengths, has_signal) == (wanted, signal)
    assert found.prompt_tokens == QUICK.prompt_tokens
    assert figures.steps >= QUICK.steps and 0.2 < figures.slot_waste < 0.8, "static batches of four lengths"
    assert measure(config, QUICK) == figures, "measured once"


def test_signal_is_drawn_with_the_share_asked_for(tmp_path: Path) -> None:
    load = Load(lengths=lognormal_lengths(20, 60), prompt_tokens=9, zero_variance=0.25)
    write_rows(tmp_path / "rows.jsonl", load, rows=400, samples_per_prompt=4, seed=1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rewards = [{length > row["answer"] for length in row["response_tokens"]} for row in rows]
    assert sum(len(kinds) == 2 for kinds in rewards) / 400 == pytest.approx(0.75, abs=0.07)
    assert len({row["prompt"] for row in rows}) == 400 and {len(row["prompt"]) for row in rows} == {8}  # and BOS


def test_gains_are_those_of_the_medians() -> None:
    def figures(trained: float) -> RunFigures:
        return RunFigures(
            **(dict.fromkeys(RunFigures.__dataclass_fields__, 1.0) | {"trained_tokens_per_second": trained})
        )

    rows: list[Row] = to_rows(["a", "b", "c"], [[figures(x) for x in some] for some in ([10, 12, 11], [22], [33, 55])])
    assert [row.trained_tokens_per_second for row in rows] == [11, 22, 44]
    assert [row.step_gain for row in rows] == [1, 2, 2] and [row.cumulative_gain for row in rows] == [1, 2, 4]
    assert rows[2].spread == pytest.approx(0.5)


def test_switches_add_up_to_the_defaults_of_a_run() -> None:
    """The last row is what a user gets who says nothing, but for int8."""
    laid = [setting for switch in switches(1) for setting in switch.settings]
    config = load_config(None, ["model.path=m", "data.train=d", *laid])
    plain = load_config(None, ["model.path=m", "data.train=d", "inference.quantization=int8"])
    assert config == plain


def test_another_load_is_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "ablation.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds measurements of another load"):
        bench_ablation(tmp_path, load=DEFAULT, progress=print)


@pytest.mark.parametrize("wrong", ["optim.lrr=1", "rollout.window=1"])  # the window, of the fourth row alone
def test_settings_of_no_run_leave_nothing_behind(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown key|raise it or leave it out"):
        bench_ablation(tmp_path / "out", load=DEFAULT, overrides=[wrong], progress=pytest.fail)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("override", "of_config"),
    [
        ("rollout.async_steps=8", True),
        ("inference.batching=static", True),
        ("logging.rollouts=false", True),
        ("run.output_dir=elsewhere", True),
        ("rollout.samples_per_prompt=8", False),
    ],
)
def test_what_an_ablation_sets_itself_is_no_override(tmp_path: Path, override: str, of_config: bool) -> None:
    """It would count for nothing, or take away what is measured by."""
    config = tmp_path / "run.toml" if of_config else None
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key} is set by the ablation itself; leave it out"):
        bench_ablation(tmp_path / "out", load=QUICK, config=config, overrides=[override], progress=pytest.fail)
    assert not (tmp_path / "out").exists()


def test_a_config_that_was_edited_is_another_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured(Exception):
        pass

    def measured(*_: object) -> None:
        raise Measured

    monkeypatch.setattr("olmorl.bench.ablation.measure", measured)
    file = tmp_path / "run.toml"
    for rate, met in (("1e-4", Measured), ("1e-4", Measured), ("1e-3", ConfigError)):
        file.write_text(f'model.path = "m"\ndata.train = "d"\noptim.lr = {rate}\nlogging.rollouts = false\n')
        with pytest.raises(met):
            bench_ablation(tmp_path / "out", load=QUICK, config=file, progress=print)
    kept = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert kept["settings"]["logging"]["rollouts"], "a plan is made of what a row was given"


@pytest.mark.soak
def test_the_command(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    command = ["bench", "ablation", "--quick", "--out", str(tmp_path / "runs"), "--json", str(out), "--plot", str(page)]
    assert run(command) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6 and all(set(row) >= COLUMNS for row in rows)
    assert all(row["trained_tokens_per_second"] > 0 and row["predicted_trained_tokens_per_second"] > 0 for row in rows)
    assert "trained tokens/s" in page.read_text()
    stamps = {path: path.stat().st_mtime for path in (tmp_path / "runs").glob("row_*/figures.json")}
    assert run(command) == 0
    assert stamps == {path: path.stat().st_mtime for path in stamps}, "rows are measured once"
