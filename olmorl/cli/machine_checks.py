"""Has this machine what a run needs: ports, open files, memory, disk?"""

import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from olmorl.cli.finding import Finding

OPEN_FILES = 4096  # Ray holds some sockets and files for every worker
GB = 1 << 30
RAY_FULL = 0.95  # the share of a disk in use at which Ray stops creating objects


def check_machine(folder: Path) -> Iterator[Finding]:
    yield _ports()
    yield _open_files()
    yield _memory()
    yield from _disks(folder)


def _ports() -> Finding:
    host = socket.gethostname()
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=5):
                pass
    except OSError as error:
        return Finding("fail", f"a port of 127.0.0.1 cannot be used: {error}", "see the firewall or sandbox rules")
    try:
        socket.gethostbyname(host)
    except OSError:
        fix = f"add a line '127.0.0.1 {host}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface"
        return Finding("warn", f"this host's name {host!r} does not resolve; gloo may not find its address", fix)
    return Finding("ok", f"ports can be bound and reached; host {host}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        fix = (
            f"ulimit -n {OPEN_FILES}"
            if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
            else "raise the hard limit"
        )
        return Finding("warn", f"only {soft} open files are allowed; Ray wants {OPEN_FILES}", fix)
    return Finding("ok", "open files: " + ("no limit" if soft == resource.RLIM_INFINITY else f"{soft} allowed"))


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    what = f"memory: {memory.available / GB:.1f} of {memory.total / GB:.1f} GB free"
    if memory.available < 2 * GB:
        return Finding("warn", what, "a run starts several processes with torch, half a GB each; end other programs")
    return Finding("ok", what)


def _disks(folder: Path) -> Iterator[Finding]:
    here = shutil.disk_usage(folder)
    what = f"disk: {here.free / GB:.1f} GB free at {folder}"
    if here.free < GB:
        yield Finding("fail", what, "free some space, or set run.output_dir to another disk")
    elif here.free < 10 * GB:
        yield Finding("warn", what, "checkpoints hold weights and optimizer, 14 bytes a parameter and more")
    else:
        yield Finding("ok", what)
    ray = shutil.disk_usage(tempfile.gettempdir())
    if ray.used / ray.total > RAY_FULL:
        what = f"{tempfile.gettempdir()} is {ray.used / ray.total:.0%} full; Ray refuses objects above {RAY_FULL:.0%}"
        yield Finding("warn", what, "free some space, or set RAY_TMPDIR to another disk")
    shared = Path("/dev/shm")
    if shared.exists() and shutil.disk_usage(shared).total < GB:
        what = f"/dev/shm has {shutil.disk_usage(shared).total / GB:.2f} GB; Ray's objects go to disk instead"
        yield Finding("warn", what, "in a container: --shm-size=4g")
