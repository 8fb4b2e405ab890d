"""What is kept, what is set aside and what counts as complete, after a crash at any moment."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.controller.run import Run
from olmorl.controller.run_directory import MARKER, RunDirectory, write_json


def metrics(directory: RunDirectory) -> list[int]:
    return [json.loads(line)["progress/step"] for line in directory.metrics_file.read_text().splitlines()]


def make_run(path: Path, *, steps: int, checkpoints: tuple[int, ...], keep: int = 9) -> RunDirectory:
    """A directory as a run leaves it after `steps` steps."""
    directory = RunDirectory(path)
    assert directory.prepare(resume=False) == (1, None)
    rows = [json.dumps({"progress/step": step}) + "\n" for step in range(steps + 1)]
    directory.metrics_file.write_text("".join(rows))
    for step in range(1, steps + 1):
        directory.rollouts_file(step).touch()
    for step in checkpoints:
        write_checkpoint(directory, step)
        directory.complete_checkpoint(step, keep=keep)
    return directory


def write_checkpoint(directory: RunDirectory, step: int) -> None:
    (directory.checkpoint(step) / "learner").mkdir(parents=True)
    (directory.checkpoint(step) / "learner" / "weights").write_text("w")


def test_an_existing_run_is_refused_without_resume(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=1, checkpoints=())
    with pytest.raises(ConfigError, match=r"already holds a run; continue it with --resume"):
        directory.prepare(resume=False)
    assert metrics(directory) == [0, 1]


def test_one_driver_runs_a_directory(tmp_path: Path, quickstart_config: Callable[..., Config]) -> None:
    """A second one would set aside what the first has just written."""
    config = quickstart_config("run.name=run", f"run.output_dir={tmp_path}")
    (tmp_path / "run").mkdir()
    at_work = RunDirectory(tmp_path / "run").claim()
    with Run(config, resume=True) as second, pytest.raises(ConfigError, match=r"another process runs .*/run; wait"):
        second.start()
    at_work.close()
    RunDirectory(tmp_path / "run").claim().close()


def test_a_start_that_failed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.prepare(resume=False)
    directory.metrics_file.touch()
    assert directory.prepare(resume=False) == (2, None)


def test_resume_continues_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=7, checkpoints=(2, 4))
    write_checkpoint(directory, 6)  # killed before its marker stood
    assert directory.prepare(resume=True) == (2, directory.checkpoint(4))
    assert not directory.checkpoint(6).exists()
    assert (directory.path / "attempt_1" / "checkpoints" / "step_000006" / "learner" / "weights").exists()
    assert (directory.path / "checkpoints" / "latest").resolve() == directory.checkpoint(4)


def test_rows_beyond_the_checkpoint_move_to_the_attempt(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=5, checkpoints=(3,))
    directory.summary_file.write_text("{}")
    with directory.metrics_file.open("a") as file:
        file.write('{"progress/step": 6, "rewa')  # torn by the kill
    directory.prepare(resume=True)
    assert metrics(directory) == [0, 1, 2, 3]
    aside = directory.path / "attempt_1"
    assert (aside / "metrics.jsonl").read_text().count("\n") == 2
    assert (aside / "metrics.jsonl").read_text().endswith('"rewa')
    assert sorted(p.name for p in (aside / "rollouts").iterdir()) == ["step_000004.parquet", "step_000005.parquet"]
    assert sorted(p.name for p in (directory.path / "rollouts").iterdir())[-1] == "step_000003.parquet"
    assert not directory.summary_file.exists(), "it speaks of another attempt"


def test_without_a_complete_checkpoint_everything_starts_anew(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=2, checkpoints=())
    assert directory.prepare(resume=True) == (2, None)
    assert metrics(directory) == []
    assert (directory.path / "attempt_1" / "rollouts" / "step_000001.parquet").exists()
    assert directory.prepare(resume=True) == (3, None)


def test_the_newest_checkpoints_are_kept_and_latest_points_at_the_last(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=3, checkpoints=(999_998, 999_999, 1_000_000), keep=2)
    assert directory.newest_complete() == directory.checkpoint(1_000_000)
    assert not directory.checkpoint(999_998).exists()
    assert directory.checkpoint(999_999).exists()
    assert (directory.path / "checkpoints" / "latest").resolve() == directory.checkpoint(1_000_000)
    assert (directory.checkpoint(1_000_000) / MARKER).read_text() == "1000000\n"


def test_finished_only_when_all_steps_are_done(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=4, checkpoints=(4,))
    assert directory.finished(4) is None, "it was killed before its summary"
    write_json(directory.summary_file, {"exit_reason": "interrupted"})
    assert directory.finished(4) is None
    write_json(directory.summary_file, {"exit_reason": "finished", "steps": 4})
    assert directory.finished(4) == {"exit_reason": "finished", "steps": 4}
    assert directory.finished(5) is None, "run.steps was raised"


def test_old_logs_may_be_cleared_away(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=3, checkpoints=(1,))
    assert directory.prepare(resume=True)[0] == 2
    directory.logs(1).rmdir()
    assert directory.prepare(resume=True)[0] == 3
    shutil.rmtree(directory.path / "logs")
    assert directory.prepare(resume=True)[0] == 3, "attempt_1/ holds rows that may not be replaced"


def test_a_copy_and_what_was_cut_short_are_no_steps(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=4, checkpoints=(2, 4))
    for name in ("step_000004_mine", "step_000009.bak"):
        shutil.copytree(directory.checkpoint(4), directory.path / "checkpoints" / name)
    for name in ("step_000002", "step_000004.partial"):
        (directory.path / "export" / name).mkdir()
        (directory.path / "export" / name / "model.safetensors").touch()
    assert directory.newest_export() == (2, directory.export(2))
    assert directory.prepare(resume=True) == (2, directory.checkpoint(4))
    write_checkpoint(directory, 5)
    directory.complete_checkpoint(5, keep=1)
    left = {path.name for path in (directory.path / "checkpoints").iterdir()}
    assert left == {"step_000005", "latest", "step_000004_mine", "step_000009.bak"}
