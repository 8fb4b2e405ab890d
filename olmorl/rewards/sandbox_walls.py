"""The walls around model-written code: what the kernel is asked for, each wall on its own, so that doctor can test it.

With namespaces the code sees a root folder of its own that holds the interpreter and an empty folder to work in, no
network, and no process but its own; the first process of the pid namespace takes all others down with it. Without
them what is left is a separate user (as root) and resource limits.

Standard library only: this runs in a process that has nothing else.
"""

import ctypes
import os
import resource
import signal
import stat
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1 << 12, 1 << 14, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CAPABILITY_VERSION = 0x20080522
NOBODY = 65534
FIRST_UID, NUM_UIDS = 61184, 4096  # below 65536, which is all that a container may have mapped
WORK = "/sandbox"
CLOSED = "is closed to other users"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *args: object) -> None:
    if getattr(_libc, function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def die_with_parent(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def adopt_orphans() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def unshare_all() -> None:
    """New namespaces of every kind; the pid namespace holds from the next fork on. Where the right is missing, by way
    of a user namespace. Raises OSError where the machine does not allow that either."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", flags)
        return
    except PermissionError:
        _call("unshare", flags | CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def enter_root(root: str) -> bool:
    """Make `root`, an empty folder, the root folder, holding system and interpreter read-only. Returns whether there
    is a /proc (a container may refuse one)."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    interpreter = [os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    for path in dict.fromkeys([*SYSTEM, *interpreter, sys.prefix, *DEVICES]):
        _show(path, root)
    for name in ("proc", "old", WORK[1:]):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for link in ("tmp", "dev/shm"):
        if not os.path.exists(f"{root}/{link}"):  # an interpreter below /tmp: then /tmp shows it, and is read-only
            os.symlink(WORK, f"{root}/{link}")
    try:
        _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        has_proc = True
    except PermissionError:
        has_proc = False
    _call("pivot_root", os.fsencode(root), os.fsencode(f"{root}/old"))
    os.chdir("/")
    _call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    _mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    return has_proc


def _show(path: str, root: str) -> None:
    target = root + path
    if not os.path.exists(path) or os.path.exists(target):  # the second: lies in a folder that is already shown
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and path in SYSTEM:  # /bin -> usr/bin
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        Path(target).touch()
    _mount(path, target, None, MS_BIND | MS_REC)
    if path not in DEVICES:
        _mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | _locked_flags(target))


def _locked_flags(path: str) -> int:
    """What a remount in a user namespace must repeat: it may add to a mount's flags, never take one away."""
    flags = os.statvfs(path).f_flag
    kept = flags & (MS_NODEV | MS_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)  # here statvfs and mount use the same bits
    return kept | (MS_RELATIME if flags & os.ST_RELATIME else 0)


def fresh_work_folder(uid: int, *, megabytes: int) -> None:
    _mount("tmpfs", WORK, "tmpfs", MS_NOSUID | MS_NODEV, f"size={megabytes}m,mode=700,nr_inodes=10000")
    if os.getuid() == 0:
        os.chown(WORK, uid, uid)


def drop_work_folder() -> None:
    _call("umount2", WORK.encode(), MNT_DETACH)


def check_readable(path: str) -> None:
    """Raises OSError when another user cannot get at `path`."""
    for folder in [Path(path), *Path(path).parents]:
        if not folder.stat().st_mode & stat.S_IXOTH:
            raise PermissionError(f"{path} holds the interpreter, but {folder} {CLOSED}")


def sandbox_uid() -> int:
    """As root: a user of its own for each process that asks, so that limits on processes are not shared."""
    return FIRST_UID + os.getpid() % NUM_UIDS if os.getuid() == 0 else os.getuid()


def become(uid: int) -> None:
    """Give up every right for good. As a common user there is none to give up but those in a user namespace."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def limit(*, cpu_seconds: int, memory: int, processes: int, file_bytes: int, open_files: int) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
