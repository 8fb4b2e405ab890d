"""The command line as a user meets it: exit codes, one message on stderr, instant help, a clean Ctrl-C."""

import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

import olmorl
from olmorl.cli.main import run
from olmorl.config.load import load_config
from olmorl.contract.generation import EngineConfig

CONFIG = """
[model]
path = "some-model"
[data]
train = "some-data.jsonl"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"olmorl {olmorl.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], *([c, "--help"] for c in ("train", "eval", "doctor", "bench"))])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command has its line, and a terminal of 80 columns has room for it."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert "Usage: olmorl" in out and "..." not in out.partition("Commands:")[2]


REQUIRED = {"rollout": ["--prompts", "p.jsonl", "--out", "o.jsonl"], "bench": ["--workload", "w.json"]}
NO_OPTION = {"model", "gpu_memory_utilization", "gpu_share", "schedule_dir"}


@pytest.mark.parametrize("command", [["rollout"], ["serve"], ["bench", "engine"]])
def test_every_command_with_an_engine_has_its_options(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    offered = set(re.findall(r"--([a-z-]+)", capsys.readouterr().out))
    wanted = {field.name.replace("_", "-") for field in fields(EngineConfig) if field.name not in NO_OPTION}
    assert not wanted - offered
    assert run([*command, "--model", "m", "--device", "tpu", *REQUIRED.get(command[0], [])]) == 2
    assert "--device is 'tpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "'train'"),
        (["train"], "CONFIG"),
        (["train", "nowhere.toml"], "nowhere.toml: no such config file"),
        (["train", "{config}", "--no-such-option"], "--no-such-option"),
        (["train", "{config}", "run.stepz=3"], "run.steps"),
        (["train", "{config}", "run.steps=many"], "run.steps"),
        (["train", "{config}", "run.steps"], "section.key=value"),
        (["eval"], "name the model once"),
        (["eval", "m", "--model", "m"], "name the model once"),
        (["eval", "m"], "give --data"),
        (["eval", "./no/such/model", "--data", "d.jsonl"], "no/such/model: no such model folder"),
        (["eval", "m", "--data", "d.jsonl", "--temperature", "-1"], "eval.temperature is -1.0"),
        # What a command writes in the end, and how long it takes, is looked at before anything is loaded.
        (["eval", "m", "--data", "d.jsonl", "--json", "/"], "/ cannot be written: it is a folder"),
        (["eval", "m", "--data", "d.jsonl", "--samples", "{config}/s.parquet"], "cannot be written"),
        (["quantize", "--model", "m", "--prompts", "p", "--out", "o", "--json", "{config}/a/b"], "cannot be written"),
        (["bench", "engine", "--model", "m", "--workload", "w", "--json", "{config}/x"], "x cannot be written: "),
        (["bench", "learner", "--model", "m", "--batch", "b", "--json", "/"], "cannot be written"),
        (["bench", "sync", "--model", "m", "--json", "/"], "cannot be written"),
        (["bench", "sync", "--model", "m", "--interval", "inf"], "inf is no number"),
        (["bench", "ablation", "--plot", "/"], "cannot be written"),
        (["bench", "ablation", "--seconds", "inf"], "inf is no number"),
        (["bench", "ablation", "--out", "{config}"], "run.toml is a file; give a folder"),
        (["bench", "planner", "--json", "/"], "cannot be written"),
        (["bench", "planner", "--seconds", "inf"], "inf is no number"),
        (["plan", "{config}", "--plot", "/"], "cannot be written"),
        (["plan", "{config}", "--price-per-hour", "inf"], "inf is no number"),
        (["plan", "{config}", "--as-given", "--gpus", "8"], "--as-given makes nothing of --gpus"),
        (["plan", "{config}", "--lengths", "l", "--mean-length", "9"], "--lengths makes nothing of --mean-length"),
        (["plan", "{config}", "--sharing", "1", "2"], "CONFIG makes nothing of --sharing"),
        (["plan", "--check", ".", "--gpus", "8", "--plot", "p"], "--check makes nothing of --gpus, --plot"),
        (["plan", "--check", ".", "--sharing", "0", "1"], "--sharing is 0 1; each takes 1 time as long"),
        (["plan", "--check", ".", "--sharing", "1", "nan"], "--sharing is 1 nan"),
    ],
)
def test_bad_usage(arguments: list[str], says: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([argument.format(config=config) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert says in err and "Traceback" not in err
    assert out == ""


def test_debug_shows_the_traceback_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--debug", "train", "nowhere.toml"], ["train", "nowhere.toml", "--debug"]):
        assert run(arguments) == 2
        err = capsys.readouterr().err
        assert "Traceback" in err and err.endswith("error: nowhere.toml: no such config file\n")


def test_a_bug_is_one_message(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("olmorl.cli.train.print_plan", broken)
    assert run(["train", str(config), "--dry-run"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ZeroDivisionError: of all things\n") and "Traceback" not in err and "--debug" in err


def test_dry_run_prints_a_config_that_can_be_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["run.name=mine", "optim.lr=1e-4", "rollout.async_steps=2", "optim.lr=2e-4"]
    assert run(["train", str(config), *overrides, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# it fits this machine\n# placement: 1 inference x cpu, 1 learner x cpu")
    assert f"# model, data and verifiers are not looked at: olmorl doctor {config}\n" in printed
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert load_config(again, []) == load_config(config, overrides)
    assert load_config(again, []).optim.lr == 2e-4
    assert "# window = none" in printed and 'train = [{path = "some-data.jsonl", split = "train"' in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.toml", "run.toml"], "it started something"


def test_a_float16_run_is_refused_before_anything_starts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(config), "model.dtype=float16", "--dry-run"]) == 2
    assert "set model.dtype = 'bfloat16'" in capsys.readouterr().err


def test_help_is_instant() -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "olmorl", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_command_with_its_children(signum: signal.Signals) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "olmorl", "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.readline()  # now it is at work
    command.send_signal(signum)
    _, err = command.communicate(timeout=30)  # returns only when children have closed the pipes too
    assert (command.returncode, err) == (130, "interrupted\n")
