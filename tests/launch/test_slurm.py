"""slurm.sbatch under an `srun` and a `scontrol` that know this machine alone; Ray, the run and its ending are real."""

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

SRUN = r"""#!/usr/bin/env bash
# As many tasks as asked for, each told its number; ends with the first that fails, passes on what ends it.
count=1
while [[ "$1" == --* ]]; do
  [[ "$1" != --ntasks=* ]] || count="${1#--ntasks=}"
  shift
done
if [[ "$count" == 1 ]]; then SLURM_PROCID=0 exec "$@"; fi
trap 'kill $(jobs -p) 2>/dev/null; wait' TERM EXIT
for ((task = 0; task < count; task++)); do SLURM_PROCID=$task "$@" & done
wait
"""

SCONTROL = r"""#!/usr/bin/env bash
case "$1" in
  show) echo node-0; echo node-1 ;;
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
