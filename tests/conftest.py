"""Real runs of the command, each with a Ray cluster of its own, small enough to take seconds."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

from olmorl.contract.generation import OBSERVED
from olmorl.metrics.jsonl_sink import read_metrics
from olmorl.metrics.ledger import BINS
from olmorl.metrics.rollout_log import RolloutRow, read_rollouts

if not torch.cuda.is_available():  # before anything imports Triton: its kernels then run in the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a script starts what it leaves in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or no command that a test starts would heed Ctrl-C

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """SLICE=n/count keeps every count-th test, from the n-th on: the slices of all n are all tests but the timed, each
    once.

    A soak test that says nothing of time has half an hour, on whatever machine.
    """
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
    if "SLICE" in os.environ:
        number, count = (int(part) for part in os.environ["SLICE"].split("/"))
        untimed = [item for item in items if not item.get_closest_marker("timed")]
        kept = {item for i, item in enumerate(untimed) if (i - number) % count == 0}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
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
    starts: int = 0

    @property
    def directory(self) -> Path:
        return self.folder / "outputs" / "run"

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        self.starts += 1
        options = [o for o in overrides if o.startswith("--")]
        settings = [o for o in overrides if not o.startswith("--")]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with open(self._output("out"), "wb") as out, open(self._output("err"), "wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "olmorl", "train", str(self.config), *self.small, *settings, *options],
                cwd=self.folder,
                stdout=out,
                stderr=err,
                env={**environment, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,  # so that Ctrl-C can be sent to the whole group, as a terminal does
            )

    def _output(self, stream: str) -> Path:
        return self.folder / f"command_{self.starts}.{stream}"

    @property
    def out(self) -> str:
        """What the command started last has said so far."""
        return self._output("out").read_text()

    @property
    def err(self) -> str:
        return self._output("err").read_text()

    def run(self, *overrides: str, code: int = 0) -> tuple[str, str]:
        """To its end: (stdout, stderr)."""
        process = self.start(*overrides)
        return self.end(process, code=code)

    def end(self, process: subprocess.Popen[bytes], *, code: int) -> tuple[str, str]:
        try:
            process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end\n{self.err}\n{self.logs()}") from None
        assert process.returncode == code, f"exit code {process.returncode}\n{self.out}\n{self.err}\n{self.logs()}"
        assert_ledgers_close(self)
        return self.out, self.err

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGINT)

    def wait_for(self, what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not what():
            assert process.poll() is None, f"ended with {process.returncode}: {self.err}\n{self.logs()}"
            assert time.monotonic() < deadline, f"{self.err}\n{self.logs()}"
            time.sleep(0.002)

    def has_row(self, step: int) -> bool:
        file = self.directory / "metrics.jsonl"
        return file.exists() and f'"progress/step": {step},' in file.read_text()

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

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker, found by the log file that it writes."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(Path(file.path).stem == name for file in process.open_files()):
                    return process
        raise AssertionError(f"no {name} among {[command_line(process) for process in self.processes()]}")

    def verifier(self) -> psutil.Process:
        (process,) = [p for p in self.processes() if "olmorl.rewards.process" in command_line(p)]
        return process

    def kill_all(self) -> None:
        """Whatever a test that failed has left."""
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)

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


def assert_nothing_skipped(command: Command) -> None:
    """Every occurrence that the stream served has its rows, or is in the last checkpoint to be trained yet.

    For runs of one epoch with data.shuffle=false, whose prompts are numbered in the order in which they are served.
    """
    state = json.loads((command.directory / "checkpoints" / "latest" / "driver.json").read_text())
    assert state["stream"]["epoch"] == 0 and not state["stream"]["shuffle"], "another kind of run"
    settled = [int(prompt_id.removeprefix("0_")) for prompt_id in {row.prompt_id for row in command.rollouts()}]
    waiting = [position for _, position in state["again"]] + [group["position"] for group in state["finished"]]
    assert sorted(settled + waiting) == list(range(state["stream"]["position"]))


def assert_ledgers_close(command: Command) -> None:
    """After every run that a test starts, whatever became of it. Every token and every second has one name."""
    if not (command.directory / "metrics.jsonl").exists():
        return  # it ended before it began
    assert_seconds_add_up(command)
    assert_steps_balance(command)
    summary = command.directory / "summary.json"
    if summary.exists() and command.summary()["exit_reason"] == "finished":
        assert_books_close(command)


def assert_steps_balance(command: Command) -> None:
    """At every row: what met its fate so far is what the bins of the rows so far hold."""
    settled = 0.0
    for row in command.metrics():
        settled += sum(row[f"waste/{bin}"] for bin in BINS if bin not in ("eval", "rolled_back", "lost"))
        assert settled == row["progress/tokens_total"], row["progress/step"]


def assert_seconds_add_up(command: Command) -> None:
    """What each worker spent is its span, without a gap from row to row; and in the rows of steps, with one learner and
    engines that nothing befell, the engines' time is the learner's for each of them, but for a last snapshot that is
    not there yet."""
    ends: dict[str, float] = {}
    timeline = command.directory / "timeline.jsonl"
    for line in timeline.read_text().splitlines() if timeline.exists() else []:
        row = json.loads(line)
        assert min(row["spent"].values()) >= 0, row
        assert abs(sum(row["spent"].values()) - row["span"]) < 5e-3, row
        start = row["t"] - row["span"]
        if row["spent"]["starting"] == 0:  # else it is the first of an attempt
            assert abs(start - ends.get(row["worker"], start)) < 5e-3, f"seconds before this row are missing: {row}"
        ends[row["worker"]] = row["t"]
    rows = command.metrics()
    if not rows:
        return
    assert all(seconds >= 0 for row in rows for name, seconds in row.items() if "_time/" in name)
    config = tomllib.loads((command.directory / "config.toml").read_text())
    attempts = len(list(command.directory.glob("logs/attempt_*")))
    if attempts == 1 and not rows[-1]["faults/worker_restarts"] and "max_workers" not in config["inference"]:
        learner, engines = (
            sum(seconds for row in rows for name, seconds in row.items() if name.startswith(kind))
            for kind in ("learner_time/", "engine_time/")
        )
        missing = learner - engines / config["inference"].get("workers", 1)
        assert -0.5 < missing < 2.5, f"{missing} s of each engine are missing"


def assert_books_close(command: Command) -> None:
    """Every token that any attempt received is in one bin; rows of the lineage and summary tell of the same."""
    waste, metrics = command.summary()["waste"], command.metrics()
    received = int((command.directory / "logs" / "received_tokens").read_text())
    assert received == sum(tokens for name, tokens in waste.items() if name != "lost")
    by_fate: Counter[str] = Counter()
    for row in command.rollouts():
        by_fate[row.fate] += sum(end - start for version, start, end in row.version_spans if version != OBSERVED)
    for name in ("trained", "zero_variance", "truncated", "aborted", "error"):
        assert waste[name] == by_fate[name] == sum(row[f"waste/{name}"] for row in metrics), name
    assert waste["eval"] == sum(row["waste/eval"] for row in metrics)


def assert_staleness(command: Command) -> None:
    """No token was drawn more versions before it was trained than the window allows."""
    rollout = tomllib.loads((command.directory / "config.toml").read_text())["rollout"]
    window = rollout.get("window", 2 * rollout["async_steps"])
    for row in command.rollouts():
        versions = [version for version, _, _ in row.version_spans]
        assert versions == sorted(versions)
        if row.fate == "trained":
            assert 0 <= row.step - 1 - versions[0] <= window, (row.rollout_id, row.step, versions)


def assert_invariants(
    command: Command, steps: int, *, samples_per_prompt: int = 4, driver_killed: bool = False
) -> None:
    """What holds of every finished run, whatever befell it."""
    # Two helpers of Ray's try for a minute to tell the cluster of a driver that was killed that it has ended.
    command.assert_nothing_left(but=("ray::DashboardAgent", "ray::RuntimeEnvAgent") if driver_killed else ())
    assert command.summary()["exit_reason"] == "finished"
    assert_one_row_a_step(command, steps)
    assert_one_fate_each(command, samples_per_prompt=samples_per_prompt)
    assert_nothing_skipped(command)
    assert_staleness(command)
    assert_canary(command)


def assert_canary(command: Command) -> None:
    for row in command.metrics():
        assert row["canary/logprob_abs_diff_mean"] < 1e-4, row["progress/step"]
        assert row["canary/checksum_ok"] == 1


@dataclass(frozen=True)
class Checks:
    one_row_a_step: Callable[[Command, int], None] = assert_one_row_a_step
    one_fate_each: Callable[..., None] = assert_one_fate_each
    canary: Callable[[Command], None] = assert_canary
    invariants: Callable[..., None] = assert_invariants


@pytest.fixture(scope="session")
def wandb_history() -> Callable[[Path], list[dict[str, object]]]:
    """What was logged of a run directory, row by row in the order of its attempts."""

    def read(directory: Path) -> list[dict[str, object]]:
        files = sorted((directory / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
        return [row for file in files for row in read_history(file)]

    return read


def read_history(path: Path) -> Iterator[dict[str, object]]:
    """From wandb's own file: a header of 7 bytes, then records in blocks of 32 KiB (LevelDB's log)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # the end of a block is padding
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            items = Record.FromString(record).history.item
            record = b""
            if items:
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.fixture(scope="session")
def checks() -> Checks:
    return Checks()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.kill_all()


@pytest.fixture(scope="session")
def command_in() -> Callable[[Path], Command]:
    return Command
