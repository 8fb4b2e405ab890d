"""Programs that mean harm, each against the real walls of this machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from olmorl.rewards import sandbox
from olmorl.rewards import sandbox_walls as walls
from olmorl.rewards.sandbox import Limits, Outcome, Program, SandboxError, has_namespaces, run_programs, sandbox_report

pytestmark = pytest.mark.timeout(90)
needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="this machine gives no namespaces")
LIMITS = Limits(cpu_seconds=0.3, wall_seconds=2.5, memory_mb=200, files_mb=16, processes=16, output_bytes=100_000)


def run(source: str, stdin: str = "", *, limits: Limits = LIMITS, **options) -> Outcome:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    [outcome] = run_programs([Program(source, stdin)], limits=limits, budget_seconds=30.0, **options)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    return outcome


def test_a_program_runs_as_python_would_run_it() -> None:
    source = """
import sys, threading
def main():
    print(__name__, input(), sys.stdin.read().split())
if __name__ == "__main__":
    threading.Thread(target=main).start()
"""
    outcome = run(source, "eins\nzwei drei\n")
    assert (outcome.finished, outcome.exit_code, outcome.exceeded) == (True, 0, "")
    assert outcome.stdout == "__main__ eins ['zwei', 'drei']\n"


def test_libraries_are_there() -> None:
    outcome = run("import numpy\nprint(numpy.arange(4).sum())", limits=Limits())
    assert outcome.stdout == "6\n", outcome.stderr


@pytest.mark.parametrize(
    ("source", "exit_code", "stderr"),
    [
        ("1/0", 1, "ZeroDivisionError"),
        ("def f(:", 1, "SyntaxError"),
        ("import sys; sys.exit(3)", 1, ""),
        ("import sys; sys.exit(0)", 0, ""),
        ("import os; os._exit(0)", 0, ""),
        ("raise SystemExit", 0, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import ctypes; ctypes.string_at(0)", -11, ""),
        ("def f(): f()\nf()", 1, "RecursionError"),
        ("x = '\\0'\n\0", 1, "null bytes"),
    ],
)
def test_a_program_that_does_not_reach_its_end_has_not_finished(source: str, exit_code: int, stderr: str) -> None:
    outcome = run(source)
    assert (outcome.finished, outcome.exit_code) == (False, exit_code) and stderr in outcome.stderr


@pytest.mark.parametrize(
    ("name", "source", "exceeded"),
    [
        ("infinite loop", "while True: pass", "time"),
        ("sleep", "import time; time.sleep(100)", "time"),
        ("no answer to SIGTERM", "import signal\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n"
         "  except OSError: pass\nwhile True: pass", "time"),
        ("stops itself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "time"),
        ("all signals blocked", "import signal; signal.pthread_sigmask(0, range(1, 65))\nwhile True: pass", "time"),
        ("children burn the time", "import os\nfor _ in range(3): os.fork()\nwhile True: pass", "time"),
        ("huge output", "while True: print('x' * 1000)", "output"),
        ("huge error output", "import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    ],
)  # fmt: skip
def test_excess_is_ended_and_named(name: str, source: str, exceeded: str) -> None:
    start = time.monotonic()
    outcome = run(source)
    assert (outcome.finished, outcome.exceeded) == (False, exceeded)
    assert time.monotonic() - start < 25


def test_memory_bombs() -> None:
    alone = run("x = bytearray(10**10)")
    assert not alone.finished and "MemoryError" in alone.stderr
    together = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(60 << 20)\ntime.sleep(3)"
    assert run(together).exceeded == "memory"
    growing = run("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert not growing.finished


def test_fork_bomb_is_bounded_and_leaves_nothing() -> None:
    source = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    start = time.monotonic()
    outcome = run(source)
    assert not outcome.finished and time.monotonic() - start < 25
    count = "import os\nn = 0\nwhile n < 100:\n  try: pid = os.fork()\n  except OSError: break\n"
    count += "  if not pid: import time; time.sleep(60)\n  n += 1\nprint(n)"
    assert int(run(count).stdout) < LIMITS.processes or os.getuid() != 0


def test_full_disk_and_big_files_cost_only_the_program() -> None:
    big = run("open('big', 'wb').write(b'x' * (64 << 20))")
    assert not big.finished
    many = run("for i in range(100): open(str(i), 'wb').write(b'x' * (1 << 20))")
    assert not many.finished or not has_namespaces()
    assert run("print(__import__('os').listdir())").stdout == "[]\n"


def test_too_many_open_files() -> None:
    assert "Too many open files" in run("x = [open('/dev/null') for _ in range(1000)]").stderr


def test_daemons_die_with_their_program() -> None:
    source = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        while True: time.sleep(0.01)
    os._exit(0)
"""
    assert run(source).finished


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLMORL_TEST_SECRET", "s3cret")
    source = "import os\nprint(dict(os.environ), open('/proc/self/environ').read())"
    assert "s3cret" not in run(source).stdout
    assert run("print(__import__('sys').argv)").stdout == "['program.py']\n"


def test_what_one_program_leaves_the_next_does_not_see() -> None:
    programs = [Program("open('a', 'w').write('1')"), Program("import os; print(os.path.exists('a'))")]
    outcomes = run_programs(programs, limits=LIMITS, budget_seconds=30.0)
    assert [outcome.finished for outcome in outcomes] == [True, True] and outcomes[1].stdout == "False\n"


@needs_namespaces
def test_the_parents_files_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    source = f"import os\nprint(os.listdir('/'), os.listdir('/dev'))\nprint(open({str(secret)!r}).read())"
    outcome = run(source)
    assert "s3cret" not in outcome.stdout and "FileNotFoundError" in outcome.stderr
    for path in ("/etc/passwd", "/proc/1/environ", str(Path(__file__)), sandbox.__file__):
        assert run(f"open({path!r}).read()").exit_code == 1
    for path in ("/usr/evil", "/evil", "/etc/evil", "/proc/sys/kernel/hostname"):
        assert run(f"open({path!r}, 'w').write('x')").exit_code == 1


@needs_namespaces
def test_other_processes_cannot_be_reached() -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        source = f"""
import os
for pid in ({os.getpid()}, {victim.pid}, 1):
    for number in (9, 15):
        try: os.kill(pid, number); print("sent", pid)
        except OSError as error: print(type(error).__name__)
try: os.kill(-1, 9)
except OSError as error: print(type(error).__name__)
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()), os.getpid())
"""
        outcome = run(source)
        assert outcome.finished, outcome
        assert f"sent {os.getpid()}" not in outcome.stdout and f"sent {victim.pid}" not in outcome.stdout
        assert victim.poll() is None
        assert outcome.stdout.splitlines()[-1] == "[1, 2] 2"
    finally:
        victim.kill()
        victim.wait()


@needs_namespaces
def test_no_network() -> None:
    source = "import socket\nprint(socket.if_nameindex())\nsocket.create_connection(('127.0.0.1', 22), timeout=1)"
    outcome = run(source)
    assert outcome.exit_code == 1 and "[(1, 'lo')]" in outcome.stdout


@needs_namespaces
@pytest.mark.parametrize(
    "source",
    [
        "import os; os.setuid(0)",
        "import os; os.chroot('.')",
        "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/sandbox', b'tmpfs', 0, None) == 0",
        "import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
        "import ctypes; assert ctypes.CDLL(None).umount2(b'/proc', 2) == 0",
        "import os; os.mknod('/sandbox/d', 0o600 | 0o060000, os.makedev(8, 0))",
    ],
)
def test_rights_are_gone_for_good(source: str) -> None:
    assert run(source).exit_code == 1


def test_a_budget_ends_the_series() -> None:
    programs = [Program("while True: pass")] * 50
    start = time.monotonic()
    outcomes = run_programs(programs, limits=LIMITS, budget_seconds=2.0)
    assert 1 <= len(outcomes) < 20 and time.monotonic() - start < 20
    assert all(outcome.exceeded == "time" for outcome in outcomes)


def test_a_program_that_eats_its_token_has_not_finished() -> None:
    assert not run("import os; os.read(3, 16); os._exit(0)").finished
    assert not run("import os; os.write(4, b'x' * 16); os._exit(0)").finished


def test_report_and_what_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    report = sandbox_report()
    assert len(report) == 9 and (not has_namespaces() or all(wall.stands for wall in report)), report
    monkeypatch.setattr(sandbox.sys, "executable", "/bin/false")
    [wall] = sandbox_report(namespaces=True)
    assert not wall.stands and wall.detail
    with pytest.raises(SandboxError):
        run_programs([Program("pass")], limits=LIMITS, budget_seconds=1.0, namespaces=True)


def open_to_all(interpreter: str) -> bool:
    try:
        walls.check_readable(os.path.realpath(interpreter))
    except OSError:
        return False
    return True


PLAIN = next(filter(open_to_all, (sys.executable, "/usr/bin/python3")), None)


@pytest.mark.skipif(PLAIN is None, reason="no interpreter that another user may read")
@pytest.mark.parametrize(
    ("source", "exceeded"),
    [
        ("print('hello')", ""),
        ("while True: pass", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "time"),
        ("import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(60)", ""),
        ("open('/proc/1/environ').read()", None),
        ("import os; os.kill(PARENT, 9)", None),
    ],
)
def test_without_namespaces(monkeypatch: pytest.MonkeyPatch, source: str, exceeded: str) -> None:
    monkeypatch.setattr(sandbox.sys, "executable", PLAIN)
    outcome = run(source.replace("PARENT", str(os.getpid())), namespaces=False)
    if exceeded is None:  # a common user's own processes are open to it here, which is what the report says
        assert not outcome.finished or os.getuid() != 0
    else:
        assert (outcome.exceeded, outcome.finished) == (exceeded, not exceeded), outcome
