"""Small runs on a Ray cluster of several nodes: hosts made of namespaces, or plain processes."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from olmorl.metrics.jsonl_sink import read_metrics
from olmorl.metrics.rollout_log import RolloutRow, read_rollouts

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
SMALL = (
    "run.name=run",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "inference.max_num_seqs=3",
    "inference.kv_cache_tokens=2048",
    "inference.threads=1",
    "learner.threads=1",
    "optim.warmup_steps=0",
    "eval.data=[]",
    "sync.canary_sequences=4",
    "checkpoint.export=false",
    "logging.wandb=disabled",
)
DEADLINE_SECONDS = 240.0


@dataclass
class Run:
    """`olmorl train` in `folder`, started by whatever starts processes on the right host."""

    folder: Path
    spawn: Callable[..., subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes] | None = None
    settings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def directory(self) -> Path:
        return self.folder / "outputs" / "run"

    def start(self, *settings: str, resume: bool = False) -> None:
        self.settings = settings
        command = [
            sys.executable,
            "-m",
            "olmorl",
            "train",
            str(QUICKSTART),
            *SMALL,
            *settings,
        ]
        with open(self.folder / "said", "ab") as said:
            self.process = self.spawn(
                command + ["--resume"] * resume, cwd=self.folder, stdout=said, stderr=said, start_new_session=True
            )

    def end(self, *, code: int = 0) -> None:
        assert self.process is not None, "start() first"
        try:
            self.process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end\n{self.said()}") from None
        assert self.process.returncode == code, self.said()

    def interrupt(self) -> None:
        """Ctrl-C, unless it has ended."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(timeout=60)

    def wait_for(self, what: Callable[[], bool]) -> None:
        assert self.process is not None, "start() first"
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not what():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def steps(self) -> int:
        file = self.directory / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def worker(self, name: str) -> psutil.Process | None:
        """Its process, found by the log file that it writes."""
        for process in psutil.process_iter():
            try:
                if process.name().startswith("ray::") and any(
                    Path(f.path).stem == name and Path(f.path).is_relative_to(self.folder) for f in process.open_files()
                ):
                    return process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return None

    def metrics(self) -> list[dict[str, float]]:
        return list(read_metrics(self.directory / "metrics.jsonl"))

    def assert_no_worker_left(self) -> None:
        deadline = time.monotonic() + 30
        while any(self.worker(log.stem) for log in self.directory.glob("logs/attempt_*/*.log")):
            assert time.monotonic() < deadline, "a worker that was given up lives on"
            time.sleep(0.2)

    def rollouts(self) -> list[RolloutRow]:
        return [row for file in self._rollout_files() for row in read_rollouts(file)]

    def served_last(self) -> set[str]:
        """The engines that have samples in the newest step."""
        return {row.worker for row in read_rollouts(self._rollout_files()[-1])}

    def _rollout_files(self) -> list[Path]:
        return sorted((self.directory / "rollouts").glob("step_*.parquet"))

    def said(self) -> str:
        logs = sorted(self.directory.glob("logs/attempt_*/*.log"))
        return (self.folder / "said").read_text() + "".join(f"--- {log}\n{log.read_text()[-2000:]}" for log in logs)

    def assert_well(self, steps: int) -> None:
        """It ended as if nothing had happened: one row a step, one fate a sample, one model in engines and learners."""
        rows = self.metrics()
        assert [row["progress/step"] for row in rows] == list(range(steps + 1)), self.said()
        for row in rows:
            assert row["canary/checksum_ok"] == 1 and row["canary/logprob_abs_diff_mean"] < 1e-4, row
        done = [row for row in self.rollouts() if row.step <= steps]  # an interrupted run may have begun the next
        assert set(Counter(row.rollout_id for row in done).values()) == {1}, "a sample met two fates"
        assert set(Counter(row.prompt_id for row in done).values()) == {4}, "a sample of a group is missing"
        assert sum(row.fate == "trained" for row in done) == 8 * steps


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A run whose processes are started by the function given."""
    made: list[Run] = []

    def make(spawn: Callable[..., subprocess.Popen[bytes]]) -> Run:
        made.append(Run(tmp_path, spawn))
        return made[-1]

    yield make
    for run in made:
        run.interrupt()


@pytest.fixture(scope="session")
def hosts_module() -> ModuleType:
    """launch/hosts.py; skips where it cannot make hosts."""
    spec = importlib.util.spec_from_file_location("hosts", ROOT / "launch" / "hosts.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["hosts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if reason := module.why_not():
        pytest.skip(reason)
    return module


@dataclass
class OnHosts(Run):
    hosts: Any = None
    config: Path = QUICKSTART

    def command(self, *arguments: str) -> tuple[int, str]:
        """Of `olmorl`, on the first host, to its end: exit code, and all it said."""
        command = [sys.executable, "-m", "olmorl", *arguments]
        process = self.spawn(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, out.decode()

    def host_of(self, name: str) -> int:
        """Index of the host that the worker is on."""
        process = self.worker(name)
        assert process is not None, f"no {name}\n{self.said()}"
        alive = [i for i in range(len(self.hosts)) if psutil.pid_exists(self.hosts[i].pid)]
        networks = {os.readlink(f"/proc/{self.hosts[i].pid}/ns/net"): i for i in alive}
        return networks[os.readlink(f"/proc/{process.pid}/ns/net")]


@pytest.fixture
def on_hosts(tmp_path: Path, hosts_module: ModuleType) -> Iterator[Callable[[Sequence[int]], OnHosts]]:
    """Makes hosts that offer so many CPUs each, and a run whose driver is on the first."""
    made: list[OnHosts] = []

    def make(cpus: Sequence[int]) -> OnHosts:
        hosts = hosts_module.Hosts(cpus, folder=tmp_path / "hosts").__enter__()
        made.append(OnHosts(tmp_path, lambda command, **options: hosts.run(0, command, **options), hosts=hosts))
        return made[-1]

    yield make
    for run in made:
        try:
            run.interrupt()
        finally:
            run.hosts.__exit__()
