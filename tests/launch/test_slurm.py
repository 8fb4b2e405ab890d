"""slurm.sbatch under an `srun` and a `scontrol` that know this machine alone; Ray, the run and its ending are real."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

STEPS = 40
BATCH = Path(__file__).parents[2] / "launch" / "slurm.sbatch"

SRUN = f"""#!{sys.executable}
# One task on each node of the job, or on the one named, each told its number; passes on what ends it. A node is a host
# of namespaces where HOST_PIDS has it, else this machine.
import contextlib, json, os, signal, subprocess, sys
import psutil

options, command = {{}}, sys.argv[1:]
while command[0].startswith("--"):
    name, _, value = command.pop(0).partition("=")
    options[name] = value
names = options.get("--nodelist") or subprocess.check_output(["scontrol", "show"], text=True)
pids = json.loads(os.environ.get("HOST_PIDS", "{{}}"))

def start(number, name):
    namespaces = ["--net", "--uts", "--mount", "--pid", "--wd=" + os.getcwd()]
    enter = ["nsenter", f"--target={{pids[name]}}", *namespaces, "--"] if pids else []
    return psutil.Popen([*enter, *command], env=os.environ | {{"SLURM_PROCID": str(number)}})

def pass_on(number, frame):
    for task in tasks:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in task.children() if pids else [task]:
                process.send_signal(number)

tasks = [start(number, name) for number, name in enumerate(names.split())]
signal.signal(signal.SIGTERM, pass_on)
sys.exit(max(abs(task.wait()) for task in tasks))
"""

SCONTROL = r"""#!/usr/bin/env bash
case "$1" in
  show) printf '%s\n' $NODES ;;
  requeue) echo "$2" >> "$REQUEUED" ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(script)
        (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "TMPDIR")},
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node-[0-1]",
        "NODES": "node-0 node-1",
        "REQUEUED": str(tmp_path / "requeued"),
    }


@pytest.fixture
def job(make_run: Any, environment: dict[str, str]) -> Any:
    def submit(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        arguments = [part for part in command[command.index("train") + 1 :] if part != "--resume"]
        return subprocess.Popen(["bash", str(BATCH), *arguments], env=environment, **options)

    return make_run(submit)


def assert_nothing_left(folder: Path) -> None:
    """Everything that the job starts works in its folder."""
    deadline = time.monotonic() + 60  # two helpers of Ray's look for their dead cluster for that long
    while left := [process for process in psutil.process_iter() if works_in(process, folder)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
        return False


def test_a_job_that_is_preempted_goes_back_into_the_queue_and_continues(
    job: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    settings = (f"run.steps={STEPS}", "checkpoint.every=5", "inference.workers=2")
    job.start(*settings)
    job.wait_for(lambda: job.steps() > 6)
    assert job.process is not None
    os.kill(job.process.pid, signal.SIGTERM)
    job.end()
    assert (tmp_path / "requeued").read_text().split() == [environment["SLURM_JOB_ID"]]
    assert job.steps() <= STEPS, "it was finished before it was told to stop"

    job.start(*settings)
    job.end()
    job.assert_well(STEPS)
    assert len((tmp_path / "requeued").read_text().split()) == 1
    assert {row.attempt for row in job.rollouts()} == {1, 2}
    assert_nothing_left(tmp_path)


def test_on_three_hosts_one_is_taken_away_and_the_job_requeued_continues_on_another(
    job: Any, environment: dict[str, str], hosts_module: Any, tmp_path: Path
) -> None:
    """Two engines and two learner ranks; the cluster, the run and its updates cross between hosts."""

    class Bare(hosts_module.Hosts):  # type: ignore[misc]
        def start_ray(self, index: int) -> subprocess.Popen[bytes]:  # which is the batch script's to do
            return self.run(index, ["true"])

    def use(*indices: int) -> None:
        environment["NODES"] = " ".join(hosts[index].name for index in indices)
        environment["HOST_PIDS"] = json.dumps({hosts[index].name: hosts[index].pid for index in indices})

    def hosts_in_use() -> set[str]:
        workers = [job.worker(name) for name in ("inference-0", "inference-1", "learner-0", "learner-1")]
        return {os.readlink(f"/proc/{worker.pid}/ns/net") for worker in workers if worker is not None}

    environment["TMPDIR"] = "/tmp/ray"  # of each host its own
    settings = (f"run.steps={STEPS}", "checkpoint.every=2", "inference.workers=2", "learner.workers=2")
    with Bare([2, 2, 2], folder=tmp_path / "hosts") as hosts:
        use(0, 1, 2)
        job.start(*settings)
        job.wait_for(lambda: job.steps() > 3)
        assert len(hosts_in_use()) >= 2
        hosts.kill(2)
        os.kill(job.process.pid, signal.SIGTERM)
        job.end()
        assert (tmp_path / "requeued").read_text().split() == [environment["SLURM_JOB_ID"]]
        assert job.steps() <= STEPS, "it was finished before it was told to stop"

        use(0, 1, hosts.add(2))
        job.start(*settings)
        job.wait_for(lambda: job.rollouts()[-1].attempt == 2)
        assert len(hosts_in_use()) >= 2
        job.end()
        job.assert_well(STEPS)
        assert {row.attempt for row in job.rollouts()} == {1, 2}
