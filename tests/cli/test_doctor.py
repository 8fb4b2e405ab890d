"""doctor finds what is wrong, says how to mend it, and stays green where all is well."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from olmorl.cli import doctor, machine_checks, package_checks, run_checks, sandbox_checks
from olmorl.cli.finding import Finding
from olmorl.cli.shadowed import find_shadowed, find_strays, refuse_shadowed_packages
from olmorl.cli.verifier_checks import check_verdicts
from olmorl.config.data_sections import RewardSection, SourceSection
from olmorl.contract.errors import ConfigError
from olmorl.rewards import sandbox_walls
from olmorl.rewards.sandbox import Wall


def only(findings: list[Finding], status: str) -> list[str]:
    return [f"{finding.what} -> {finding.fix}" for finding in findings if finding.status == status]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    committed = Path(__file__).parents[2] / "configs" / "quickstart" / "model"
    return Path(shutil.copytree(committed, tmp_path / "model"))


def write_config(tmp_path: Path, model: Path, data: Path) -> Path:
    path = tmp_path / "run.toml"
    model_and_data = f"[model]\npath = {json.dumps(str(model))}\n[data]\ntrain = {json.dumps(str(data))}\n"
    path.write_text(model_and_data + '[reward]\nverifier = "gsm8k"\n')
    return path


def test_this_machine_is_fit(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert doctor.examine(write_config(tmp_path, model, data)) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "gloo: a process group of one works" in out and "source data, verifier gsm8k" in out
    assert out.splitlines()[-1].endswith("0 fail")


def test_exit_code_says_that_something_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.examine(tmp_path / "nowhere.toml") == 1
    assert "fail  " in capsys.readouterr().out


def test_missing_and_unfit_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["no-such-thing>=1", "numpy>=999", "pytest; extra == 'test'", "typer>=0.15"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requirements)
    findings = list(package_checks.check_packages())
    missing, unfit = only(findings, "fail")
    assert missing == "no-such-thing is not installed -> pip install 'no-such-thing>=1'"
    assert "olmorl needs >=999" in unfit
    assert not any("pytest" in finding.what for finding in findings)


def test_a_shadowing_package_is_named(tmp_path: Path) -> None:
    """As site-packages does it: a distribution called inference lies ahead of ours on the path."""
    other = tmp_path / "inference" / "__init__.py"
    other.parent.mkdir()
    other.write_text("")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from olmorl.cli.main import main; main()"
    for arguments in (["train", "any.toml"], ["doctor"]):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == (2 if arguments[0] == "train" else 1)
        assert f"'inference' is shadowed by {other}" in done.stdout + done.stderr
        assert "pip uninstall inference" in done.stdout + done.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'learner' is not found"):
        refuse_shadowed_packages()


def test_ours_are_not_shadowed() -> None:
    assert find_shadowed() == {}
    refuse_shadowed_packages()


def test_strays_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "learner").mkdir()
    (tmp_path / "olmorl").write_text("#!/bin/sh\n")
    assert find_strays(tmp_path) == [], "neither an empty folder nor a script without .py hides anything"
    (tmp_path / "inference.py").write_text("")
    (tmp_path / "learner" / "x.py").write_text("")
    assert find_strays(tmp_path) == [tmp_path / "inference.py", tmp_path / "learner"]


def test_broken_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: libtorch is gone' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    (finding,) = doctor.probe_torch()
    assert finding.status == "fail" and "libtorch is gone" in finding.what and finding.fix


def test_machine_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")

    def unresolvable(host: str) -> str:
        raise socket.gaierror(f"no {host}")

    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(machine_checks, "RDMA", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1_048_576))
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1000 << 20, 990 << 20, 10 << 20))
    monkeypatch.setattr(socket, "gethostbyname", unresolvable)
    findings = list(machine_checks.check_machine(tmp_path))
    warnings = "\n".join(only(findings, "warn"))
    assert "ulimit -n 4096" in warnings and "ulimit -u 4096" in warnings
    assert "limits.conf) to unlimited" in warnings and "99% full" in warnings and "/etc/hosts" in warnings
    assert len(only(findings, "fail")) == 1 and "0.0 GB free" in only(findings, "fail")[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs programs as another user")
def test_an_interpreter_that_others_cannot_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without namespaces programs run as another user, and Python may lie in a home that is closed to it."""
    home = tmp_path / "home"
    (home / "python").mkdir(parents=True)
    home.chmod(0o700)
    with pytest.raises(PermissionError) as closed:
        sandbox_walls.check_readable(str(home / "python"))
    monkeypatch.setattr(
        "olmorl.cli.sandbox_checks.sandbox_report",
        lambda **_: [Wall("model-written code can be run", False, str(closed.value))],
    )
    [finding] = sandbox_checks.check_sandbox()
    assert f"{home} is closed to other users" in finding.what
    assert finding.fix.startswith("without namespaces") and "chmod o+x" in finding.fix


def test_models(model: Path, tmp_path: Path) -> None:
    assert run_checks.check_model(str(model)).status == "ok"
    assert run_checks.check_model("allenai/no-folder-here").status == "warn"
    assert {run_checks.check_model(path).status for path in ("./modl", "configs/a/model", "/modl", "modl/")} == {"fail"}
    (model / "config.json").write_text("{")
    assert "not readable as JSON" in run_checks.check_model(str(model)).what
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    assert "supported are llama, olmo2" in run_checks.check_model(str(model)).what
    (model / "model.safetensors").unlink()
    assert "lacks *.safetensors" in run_checks.check_model(str(model)).what


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such data file"),
        ("", "holds no rows"),
        ("not json\n", "data.jsonl:1: broken JSON"),
        ('{"text": "hello"}\n', "no known dialect"),
        ('{"prompt": "a", "answer": "b"}\n', "names no verifier"),
        ('{"prompt": "a", "answer": "b", "verifier": "maths"}\n', "did you mean 'math'"),
        ('{"prompt": "a", "answer": "b", "verifier": "no_module_of_mine:f"}\n', "start from the folder that holds it"),
        ('{"prompt": "a", "answer": "b", "verifier": "json:dumps"}\n', "must take (completion, ground_truth, prompt)"),
    ],
)
def test_bad_data(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "data.jsonl"
    if text is not None:
        path.write_text(text)
    finding = run_checks.check_data(SourceSection(path=str(path)), RewardSection(), set())
    assert finding.status == "fail" and says in finding.what and finding.fix


def test_parquet_data(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"]}), path)
    source, reward = SourceSection(path=str(path)), RewardSection(verifier=("math", "builtins:max"))
    assert run_checks.check_data(source, reward, set()).what.endswith("(source data, verifier math, builtins:max)")
    path.write_text("no parquet")
    assert run_checks.check_data(source, reward, set()).status == "fail"


VERIFIERS = """
import time
def judge(completion, ground_truth, prompt):
    return float(completion == ground_truth)
def fragile(completion, ground_truth, prompt):
    return float(completion.split()[-1] == ground_truth)
def broken(completion, ground_truth, prompt):
    raise RuntimeError("no licence")
def picky(completion, ground_truth, prompt):
    if int(ground_truth) > 80:
        raise LookupError("too large")
    return 1.0
class Configured:
    @classmethod
    def from_settings(cls, settings):
        assert settings.code_seconds == 3.5, f"the settings are not those of the config: {settings}"
        return cls()
    def __call__(self, completion, ground_truth, prompt):
        return 1.0
"""


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("judge", "ok", "judges 24 responses tried with {data}; ground truths as responses get 1"),
        ("fragile", "warn", "fails at 8 of 24 responses tried with {data}; at {data}:1, response '': IndexError"),
        ("broken", "fail", "fails at all 24 responses tried with {data}; at {data}:1, response '1': RuntimeError: no"),
        ("picky", "warn", "at {data}:85, response '85': LookupError: too large ({folder}/mine_all.py:11)"),
        ("Configured", "ok", "judges 24 responses"),
    ],
)
def test_verifiers_are_tried_on_rows_from_first_to_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the folder that a run is started from is on its path
    (tmp_path / "mine_all.py").write_text(VERIFIERS)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "a", "answer": str(i)}) + "\n" for i in range(1, 101)))
    reward = RewardSection(verifier=(f"mine_all:{name}",), code_seconds=3.5)
    assert run_checks.check_data(SourceSection(path=str(data)), reward, set()).status == "ok"
    [finding] = check_verdicts(SourceSection(path=str(data)), reward)
    assert (finding.status, finding.what.startswith(f"verifier mine_all:{name} ")) == (status, True)
    assert says.format(data=data, folder=tmp_path) in finding.what and bool(finding.fix) == (status != "ok")


def test_rows_beyond_the_first_are_read_and_a_judge_is_asked_once(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    row = '{"prompt": "a", "answer": "b", "verifier": "judge"}\n'
    data.write_text(3 * row)
    with socket.socket() as nobody:  # bound, and never listening
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        reward = RewardSection(judge_url=url, judge_model="m", timeout_seconds=0.5)
        [finding] = check_verdicts(SourceSection(path=str(data)), reward)
    assert finding.status == "fail" and "is late with all 1 responses" in finding.what and "Connect" in finding.what
    [finding] = check_verdicts(SourceSection(path=str(data)), RewardSection(judge_model="m"))
    assert finding.status == "fail" and "reward.judge_url" in finding.what
    data.write_text(row.replace("judge", "gsm8k").replace('"b"', '"7"') + '{"prompt": "a"}\n')
    [finding] = check_verdicts(SourceSection(path=str(data)), reward)
    assert finding.status == "fail" and f"{data}:2" in finding.what


def test_a_module_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fatal.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b", "verifier": "fatal:judge"}\n')
    finding = run_checks.check_data(SourceSection(path="data.jsonl"), RewardSection(), set())
    assert finding.status == "fail" and "exited with code 3 while it loaded fatal:judge" in finding.what


@pytest.mark.parametrize(
    ("table", "status", "says"),
    [
        ("weights = {gsm8k = 2.0}", None, ""),
        ("weights = {maths = 2.0}", "fail", "reward.weights: unknown verifier 'maths'; did you mean 'math'"),
        ("weights = {math = 2.0}", "warn", "reward.weights: no row is judged by 'math'; the verifiers are gsm8k"),
        ('remap = {GSM8K = "math"}', "warn", "reward.remap: no row names 'GSM8K'; they name gsm8k"),
    ],
)
def test_keys_of_the_reward(tmp_path: Path, model: Path, table: str, status: str | None, says: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = write_config(tmp_path, model, data)
    with config.open("a") as file:
        file.write(table + "\n")
    found = [finding for finding in run_checks.check_run(config) if "reward." in finding.what]
    assert [finding.status for finding in found] == ([] if status is None else [status])
    assert all(says in finding.what and finding.fix for finding in found)


def test_overrides_and_the_disk_that_the_run_writes_to(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    full = tmp_path / "full"
    full.mkdir()
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: usage(1 << 40, 0, 0 if Path(path) == full else 1 << 40), raising=True
    )
    config = write_config(tmp_path, model, tmp_path / "data.jsonl")

    def found(output: Path) -> str:
        findings = list(run_checks.check_run(config, [f"run.output_dir={output}"]))
        return next(str(finding) for finding in findings if "run directory" in str(finding))

    assert found(tmp_path / "new" / "place").startswith("ok ")
    assert found(full / "new").startswith("fail ") and "set run.output_dir" in found(full / "new")
    (tmp_path / "file").touch()
    assert "cannot be written to" in found(tmp_path / "file")
    assert only(list(run_checks.check_run(config, ["run.outputs=x"])), "fail")[0].count("run.outputs")


def test_impossible_placement(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, tmp_path / "data.jsonl")
    with config.open("a") as file:
        file.write('[inference]\ndevice = "cuda"\nworkers = 64\n')
    assert any("missing" in finding for finding in only(list(run_checks.check_run(config)), "fail"))
