"""Has this machine what a run needs: ports, open files, memory, disk?"""

import math
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from olmorl.cli.finding import Finding

LIMITS = (
    ("open files", "n", resource.RLIMIT_NOFILE, 4096, "Ray holds some sockets and files for every worker"),
    ("processes and threads", "u", resource.RLIMIT_NPROC, 4096, "each worker has some hundred threads"),
    ("locked memory", "l", resource.RLIMIT_MEMLOCK, math.inf, "NCCL pins what it sends through InfiniBand"),
)
RDMA = Path("/sys/class/infiniband")
GB = 1 << 30
RAY_FULL = 0.95  # the share of a disk in use at which Ray stops creating objects


def check_machine(folder: Path | None) -> Iterator[Finding]:
    """`folder`: where a run would write; None: that is looked at elsewhere."""
    yield _ports()
    yield from _limits()
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


def _limits() -> Iterator[Finding]:
    for what, flag, limit, wanted, why in LIMITS:
        if flag == "l" and not any(RDMA.glob("*")):
            continue
        soft, hard = (math.inf if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(limit))
        if soft >= wanted:
            yield Finding("ok", f"{what}: " + ("no limit" if soft == math.inf else f"{soft} allowed"))
            continue
        goal = "unlimited" if wanted == math.inf else wanted
        mend = (
            f"ulimit -{flag} {goal}"
            if hard >= wanted
            else f"raise the hard limit (/etc/security/limits.conf) to {goal}"
        )
        yield Finding("warn", f"{what}: only {soft} allowed; {why}", mend)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    what = f"memory: {memory.available / GB:.1f} of {memory.total / GB:.1f} GB free"
    if memory.available < 2 * GB:
        return Finding("warn", what, "a run starts several processes with torch, half a GB each; end other programs")
    return Finding("ok", what)


def check_disk(folder: Path, *, what: str) -> Finding:
    free = shutil.disk_usage(folder).free
    what = f"{what}: {free / GB:.1f} GB free at {folder}"
    if free < GB:
        return Finding("fail", what, "free some space, or set run.output_dir to another disk")
    if free < 10 * GB:
        return Finding("warn", what, "checkpoints hold weights and optimizer, 14 bytes a parameter and more")
    return Finding("ok", what)


def _disks(folder: Path | None) -> Iterator[Finding]:
    if folder is not None:
        yield check_disk(folder, what="disk")
    ray = shutil.disk_usage(tempfile.gettempdir())
    if ray.used / ray.total > RAY_FULL:
        what = f"{tempfile.gettempdir()} is {ray.used / ray.total:.0%} full; Ray refuses objects above {RAY_FULL:.0%}"
        yield Finding("warn", what, "free some space, or set RAY_TMPDIR to another disk")
    shared = Path("/dev/shm")
    if shared.exists() and shutil.disk_usage(shared).total < GB:
        what = f"/dev/shm has {shutil.disk_usage(shared).total / GB:.2f} GB; Ray's objects go to disk instead"
        yield Finding("warn", what, "in a container: --shm-size=4g")
