"""The sandbox's own process: runs one program after the other behind the walls, and watches each.

Started by olmorl.rewards.sandbox with an empty environment; a job comes in on standard input, results go out on
standard output, one JSON line each, as they come. What the programs print, return or signal cannot reach that
channel. Each program is a fork, for an interpreter's start takes longer than most tests.

A program counts as finished only if it reaches its end: it must then pass on a token that it has not seen before.
So an early exit with code 0 is no success.

Standard library only.
"""

import contextlib
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from olmorl.rewards import sandbox_walls as walls

POLL_SECONDS = 0.05
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
STRAGGLERS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """For each program, together with all processes it starts."""

    cpu_seconds: float = 1.0
    wall_seconds: float = 10.0
    memory_mb: int = 1024
    files_mb: int = 64
    processes: int = 32
    open_files: int = 128
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Inside:
    """How the programs are walled in."""

    limits: Limits
    uid: int
    namespaces: bool
    has_proc: bool


def main() -> None:
    walls.die_with_parent(int(sys.argv[1]))
    job = json.loads(sys.stdin.buffer.read())
    limits = Limits(**job["limits"])
    results = os.dup(1)
    uid = walls.sandbox_uid()
    if not job["namespaces"]:
        if uid != os.getuid():
            for path in (sys.base_prefix, sys.prefix):
                walls.check_readable(os.path.realpath(path))
        walls.adopt_orphans()
        supervise(job, Inside(limits, uid, namespaces=False, has_proc=True), results)
        return
    walls.unshare_all()
    first = os.fork()  # the first process of the new pid namespace
    if first:
        _, status = os.waitpid(first, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    walls.die_with_parent(0)  # a parent outside of the namespace has number 0
    has_proc = walls.enter_root(job["root"])
    supervise(job, Inside(limits, uid, namespaces=True, has_proc=has_proc), results)


def supervise(job: dict, inside: Inside, results: int) -> None:
    end = time.monotonic() + job["budget_seconds"]
    for program in job["programs"]:
        if time.monotonic() > end:
            return
        left = memoryview(json.dumps(run(program["source"], program["stdin"], inside)).encode() + b"\n")
        while left:
            left = left[os.write(results, left) :]


def run(source: str, stdin: str, inside: Inside) -> dict[str, object]:
    """One program, from a fresh folder to the end of its last process."""
    if inside.namespaces:
        walls.fresh_work_folder(inside.uid, megabytes=inside.limits.files_mb)
        try:
            return _run_in(walls.WORK, source, stdin, inside)
        finally:
            walls.drop_work_folder()
    folder = tempfile.mkdtemp(prefix="olmorl-sandbox-")
    try:
        if os.getuid() == 0:
            os.chown(folder, inside.uid, inside.uid)
        return _run_in(folder, source, stdin, inside)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder: str, source: str, stdin: str, inside: Inside) -> dict[str, object]:
    with tempfile.TemporaryFile(dir=folder) as given:
        given.write(stdin.encode("utf-8", "surrogatepass"))
        given.seek(0)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        token_read, token_write = os.pipe()
        proof_read, proof_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            become_program(folder, source, (given.fileno(), out_write, err_write, token_read, proof_write), inside)
    for end in (out_write, err_write, token_read, proof_write):
        os.close(end)
    token = secrets.token_bytes(16)
    with contextlib.suppress(BrokenPipeError):
        os.write(token_write, token)
    os.close(token_write)
    watch = Watch(pid, inside, out_read, err_read)
    watch.until_end()
    proof = os.read(proof_read, len(token))  # every writer is gone, so this cannot wait
    os.close(proof_read)
    return watch.result(finished=proof == token)


class Watch:
    """Follows one program: its output, its time, its memory; ends what exceeds a limit, and all it leaves behind."""

    def __init__(self, pid: int, inside: Inside, out: int, err: int) -> None:
        self._pid = pid
        self._inside = inside
        self._out, self._err = out, err
        self._text = {out: bytearray(), err: bytearray()}
        self._open = {out, err}
        self._exit = os.pidfd_open(pid)
        self._started = time.monotonic()
        self._exceeded = ""
        self._code = 0
        self._seconds = 0.0

    def until_end(self) -> None:
        while self._exit not in self._read(POLL_SECONDS):
            self._exceeded = self._exceeded or self._find_excess()
            if self._exceeded:
                os.kill(self._pid, signal.SIGKILL)  # it is not waited for yet, so the number is still its own
                break
        self._seconds = time.monotonic() - self._started
        self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        kill_stragglers(self._inside)
        while self._open and not self._exceeded and self._read(0.0):
            pass
        for descriptor in (self._out, self._err, self._exit):
            os.close(descriptor)

    def _read(self, timeout: float) -> list[int]:
        ready, _, _ = select.select([*self._open, self._exit], [], [], timeout)
        for stream in self._open.intersection(ready):
            chunk = os.read(stream, 1 << 16)
            self._text[stream] += chunk
            if not chunk:
                self._open.discard(stream)
        if sum(map(len, self._text.values())) > self._inside.limits.output_bytes:
            self._exceeded = "output"
        return ready

    def _find_excess(self) -> str:
        limits = self._inside.limits
        if time.monotonic() - self._started > limits.wall_seconds:
            return "time"
        if not self._inside.has_proc:
            return ""
        cpu, memory = usage(self._inside)
        if cpu > limits.cpu_seconds:
            return "time"
        return "memory" if memory > limits.memory_mb << 20 else ""

    def result(self, *, finished: bool) -> dict[str, object]:
        exceeded = self._exceeded or ("time" if self._code == -signal.SIGXCPU else "")
        return {
            "finished": finished and not exceeded,
            "exceeded": exceeded,
            "exit_code": self._code,
            "stdout": self._text[self._out][: self._inside.limits.output_bytes].decode("utf-8", "replace"),
            "stderr": self._text[self._err][-2000:].decode("utf-8", "replace"),
            "seconds": self._seconds,
        }


def usage(inside: Inside) -> tuple[float, int]:
    """CPU seconds and resident bytes of a program and of all it started."""
    stats = _stats()
    mine = set(stats) - {1} if inside.namespaces else _descendants(stats)
    ticks = sum(sum(map(int, stats[pid][11:15])) for pid in mine)  # utime, stime, and those of waited-for children
    return ticks / TICKS, sum(int(stats[pid][21]) for pid in mine) * PAGE


def _stats() -> dict[int, list[str]]:
    """The fields of /proc/PID/stat behind the name, which may hold anything."""
    stats = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
            stats[int(name)] = file.read().rpartition(")")[2].split()
    return stats


def _descendants(stats: dict[int, list[str]]) -> set[int]:
    found: set[int] = set()
    layer = {os.getpid()}
    while layer:
        layer = {pid for pid, fields in stats.items() if int(fields[1]) in layer} - found
        found |= layer
    return found


def kill_stragglers(inside: Inside) -> None:
    """End everything the program has left running, and wait until it is gone."""
    deadline = time.monotonic() + STRAGGLERS_SECONDS
    while time.monotonic() < deadline:
        if inside.namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of the namespace but its first process: this one
        else:
            if os.getuid() == 0:
                _kill_user(inside.uid)
            for pid in _descendants(_stats()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)  # they are dying; the kernel gives no word for the last of many
    raise RuntimeError("processes of a program cannot be ended")


def _kill_user(uid: int) -> None:
    pid = os.fork()
    if pid == 0:
        os.setresuid(uid, uid, uid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # reaches only processes of that user
        os._exit(0)
    os.waitpid(pid, 0)


def become_program(folder: str, source: str, channels: tuple[int, ...], inside: Inside) -> NoReturn:
    """In the fork: take the program's place behind the walls, run it, exit."""
    code = 1
    try:
        os.setsid()
        parent = os.getppid()
        for target, channel in enumerate([fcntl.fcntl(channel, fcntl.F_DUPFD, 64) for channel in channels]):
            os.dup2(channel, target)
        os.closerange(len(channels), 1 << 20)
        os.chdir(folder)
        limits = inside.limits
        walls.limit(
            cpu_seconds=int(limits.cpu_seconds) + 1,
            memory=limits.memory_mb << 20,
            processes=limits.processes + (0 if inside.namespaces else _tasks_of(inside.uid)),
            file_bytes=limits.files_mb << 20,
            open_files=limits.open_files,
        )
        walls.become(inside.uid)
        walls.die_with_parent(parent)  # a change of user takes this back, so it comes last
        os.environ.update(HOME=folder, TMPDIR=folder, PATH="/usr/bin:/bin", OPENBLAS_NUM_THREADS="1")
        code = execute(source)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _tasks_of(uid: int) -> int:
    """Threads that count against the user's limit already."""
    count = 0
    for pid, fields in _stats().items():
        with contextlib.suppress(OSError):
            count += int(fields[17]) if os.stat(f"/proc/{pid}").st_uid == uid else 0
    return count


def execute(source: str) -> int:
    """As `python program.py` would; at the end of the source the token is passed on."""
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
    sys.argv, sys.path[0] = ["program.py"], ""
    for name in [name for name in sys.modules if name.partition(".")[0] == "olmorl"]:
        del sys.modules[name]
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    read, write, join = os.read, os.write, _join_threads
    code = 0
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
        write(4, read(3, 16))
    except SystemExit as end:
        code = 0 if end.code in (None, 0) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    join()
    sys.stdout.flush()
    return code


def _join_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
