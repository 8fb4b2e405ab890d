"""Real runs of the command, each with a Ray cluster of its own, small enough to take seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from olmorl.metrics.jsonl_sink import read_metrics
from olmorl.metrics.rollout_log import RolloutRow, read_rollouts

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
SMALL = (
    "run.name=run",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "inference.max_num_seqs=3",
    "inference.kv_cache_tokens=2048",
    "inference.threads=1",
    "learner.threads=1",
    "optim.warmup_steps=0",
    "eval.limit=16",
    "logging.wandb=disabled",
)
DEADLINE_SECONDS = 240.0


@dataclass
class Command:
    """`olmorl` in `folder`. Whatever it starts has its working directory in there, and is found by it."""

    folder: Path
    config: Path = QUICKSTART
    small: tuple[str, ...] = SMALL

    @property
    def directory(self) -> Path:
        return self.folder / "outputs" / "run"

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        options = [o for o in overrides if o.startswith("--")]
        settings = [o for o in overrides if not o.startswith("--")]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.Popen(
            [sys.executable, "-m", "olmorl", "train", str(self.config), *self.small, *settings, *options],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # so that Ctrl-C can be sent to the whole group, as a terminal does
        )

    def run(self, *overrides: str, code: int = 0) -> tuple[str, str]:
        """To its end: (stdout, stderr)."""
        process = self.start(*overrides)
        return self.end(process, code=code)

    def end(self, process: subprocess.Popen[str], *, code: int) -> tuple[str, str]:
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}\n{self.logs()}"
        return out, err

    def interrupt(self, process: subprocess.Popen[str]) -> None:
        os.killpg(process.pid, signal.SIGINT)

    def wait_for(self, what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not what():
            assert process.poll() is None, f"ended with {process.returncode}: {process.communicate()}\n{self.logs()}"
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.002)

    def processes(self) -> list[psutil.Process]:
        """Those alive that work in the folder."""
        found = []
        for process in psutil.process_iter():
            try:
                inside = Path(process.cwd()).is_relative_to(self.folder)
                if inside and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
                continue
        return found

    def assert_nothing_left(self, *, but: tuple[str, ...] = ()) -> None:
        """`but`: beginnings of command lines that are let live."""
        deadline = time.monotonic() + 20
        while left := [p for p in self.processes() if not command_line(p).startswith(but or "\0")]:
            assert time.monotonic() < deadline, [command_line(process) for process in left]
            time.sleep(0.1)

    def metrics(self) -> list[dict[str, float]]:
        return list(read_metrics(self.directory / "metrics.jsonl"))

    def rollouts(self) -> list[RolloutRow]:
        files = sorted((self.directory / "rollouts").glob("step_*.parquet"))
        return [row for file in files for row in read_rollouts(file)]

    def summary(self) -> dict[str, object]:
        return json.loads((self.directory / "summary.json").read_text())

    def logs(self) -> str:
        logs = sorted(self.directory.glob("logs/attempt_*/*.log"))
        return "\n".join(f"--- {log}\n{log.read_text()[-2000:]}" for log in logs)


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def assert_one_row_a_step(command: Command, steps: int) -> None:
    assert [row["progress/step"] for row in command.metrics()] == list(range(steps + 1))
    files = sorted(path.name for path in (command.directory / "rollouts").iterdir())
    assert files == [f"step_{step:06d}.parquet" for step in range(1, steps + 1)]


def assert_one_fate_each(command: Command, *, samples_per_prompt: int = 4) -> None:
    """Along the lineage each sample of each occurrence stands in one row, and no occurrence is skipped."""
    rows = command.rollouts()
    ids = [row.rollout_id for row in rows]
    assert len(ids) == len(set(ids)), "a sample met two fates"
    assert len(ids) == samples_per_prompt * len({row.prompt_id for row in rows}), "a sample of a group is missing"


def assert_canary(command: Command) -> None:
    for row in command.metrics():
        assert row["canary/logprob_abs_diff_mean"] < 1e-4, row["progress/step"]
        assert row["canary/checksum_ok"] == 1


@dataclass(frozen=True)
class Checks:
    one_row_a_step: Callable[[Command, int], None] = assert_one_row_a_step
    one_fate_each: Callable[..., None] = assert_one_fate_each
    canary: Callable[[Command], None] = assert_canary


@pytest.fixture(scope="session")
def checks() -> Checks:
    return Checks()


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture(scope="session")
def command_in() -> Callable[[Path], Command]:
    return Command
