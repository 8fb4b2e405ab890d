"""Runs model-written programs behind walls (olmorl.rewards.sandbox_walls) and says which walls this machine has.

What can be enforced depends on the machine, so it is tried, once a process: with namespaces if they can be had, else
with a separate user (as root) and resource limits alone. `sandbox_report` tries each wall from within and is what
`olmorl doctor` prints.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from olmorl.rewards.sandbox_inside import Limits

START_SECONDS = 30.0  # of the sandbox's own process, on a busy machine
PACKAGE_ROOT = str(Path(__file__).parents[2])
BOOT = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from olmorl.rewards.sandbox_inside import main; main()"


class SandboxError(Exception):
    """The sandbox itself failed; nothing is said about the program."""


@dataclass(frozen=True, slots=True)
class Program:
    source: str
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    finished: bool
    """it came to the end of its source: no exception, no early exit, no limit exceeded"""
    exceeded: str
    """"time", "memory" or "output" if that limit ended it; else empty"""
    exit_code: int
    """negative: the number of the signal that ended it"""
    stdout: str
    stderr: str
    """its end"""
    seconds: float


def run_programs(
    programs: Sequence[Program], *, limits: Limits, budget_seconds: float, namespaces: bool | None = None
) -> list[Outcome]:
    """One outcome a program, in order; fewer when all together took longer than the budget. `namespaces` None: as
    this machine allows. Raises SandboxError."""
    walled = has_namespaces() if namespaces is None else namespaces
    with tempfile.TemporaryDirectory(prefix="olmorl-root-") as root:  # the place where the new root is put together
        job = {
            "programs": [asdict(program) for program in programs],
            "limits": asdict(limits),
            "budget_seconds": budget_seconds,
            "namespaces": walled,
            "root": root,
        }
        command = [sys.executable, "-I", "-X", "utf8", "-c", BOOT, str(os.getpid())]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/"
        )
        try:
            out, err = process.communicate(
                json.dumps(job).encode(), timeout=budget_seconds + limits.wall_seconds + START_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise SandboxError(f"no answer within {budget_seconds + START_SECONDS:.0f} s") from None
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        reason = err.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise SandboxError(f"the sandbox failed: {reason[0]}")
    return [Outcome(**json.loads(line)) for line in out.splitlines()]


@cache
def has_namespaces() -> bool:
    try:
        [outcome] = run_programs([Program("pass")], limits=Limits(), budget_seconds=10.0, namespaces=True)
    except SandboxError:
        return False
    return outcome.finished


@dataclass(frozen=True, slots=True)
class Wall:
    what: str
    stands: bool
    detail: str = ""


PROBE = """
import json, os, resource, socket, sys
pid, path, port = {pid}, {path!r}, {port}
def can(f):
    try: f(); return True
    except Exception: return False
print(json.dumps({{
    "signal": can(lambda: os.kill(pid, 0)),
    "see": os.path.exists(f"/proc/{{pid}}"),
    "read": can(lambda: open(path).read()),
    "network": can(lambda: socket.create_connection(("127.0.0.1", port), timeout=2)),
    "uid": os.getuid(),
    "proc": os.path.exists("/proc/self"),
    "environment": sorted(set(os.environ) - {{"HOME", "TMPDIR", "PATH", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}}),
    "limits": all(resource.getrlimit(r)[1] != -1 for r in (
        resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)),
}}))
"""


def sandbox_report(*, namespaces: bool | None = None) -> list[Wall]:
    """Each wall, tried from within by a program that wants through."""
    walled = has_namespaces() if namespaces is None else namespaces
    with contextlib.ExitStack() as stack:
        secret = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        os.chmod(secret.name, 0o644)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        source = PROBE.format(pid=os.getpid(), path=secret.name, port=listener.getsockname()[1])
        try:
            outcomes = run_programs([Program(source)], limits=Limits(), budget_seconds=10.0, namespaces=walled)
        except SandboxError as error:
            return [Wall("model-written code can be run", False, str(error))]
    if not outcomes or not outcomes[0].finished:
        return [Wall("model-written code can be run", False, outcomes[0].stderr if outcomes else "no answer")]
    found = json.loads(outcomes[0].stdout)
    return [
        Wall("limits on CPU time, memory, processes, files and output", found["limits"]),
        Wall("an empty environment", not found["environment"], ", ".join(found["environment"])),
        Wall("a user of its own", walled or found["uid"] != os.getuid(), f"uid {found['uid']}"),
        Wall("no sight of other processes", not found["see"]),
        Wall("no signals to other processes", not found["signal"]),
        Wall("no files but the interpreter's and the system's", not found["read"]),
        Wall("no network", not found["network"]),
        Wall("no process outlives its program", walled, "" if walled else "one that leaves its session may"),
        Wall("memory counted over all processes of a program", found["proc"]),
    ]
