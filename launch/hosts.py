#!/usr/bin/env python3
"""Several hosts on one machine, with a real Ray cluster on them: to try and to test what needs more than one.

    python launch/hosts.py --cpus 1,1,1 -- olmorl train configs/quickstart.toml learner.workers=2

Each host is a set of Linux namespaces (network, host name, processes, mounts) with an address of its own, and all are
plugged into one bridge. The command runs on the first, with RAY_ADDRESS set. Nothing is left behind, whatever happens:
a host is gone with the first process in it, and that one dies with this script. Needs iproute2 and util-linux, and
either root or a kernel that gives users namespaces of their own.
"""

import argparse
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
MOST_HOSTS = 64
PORT = 6379
START_SECONDS = 120
# A lost host is off Ray's list after 30 s at most (its own default takes a minute), but not for a pause of 20 s.
HEALTH = {
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
ISOLATE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
INIT = "sleep infinity & wait"  # a shell as the first process reaps those that lost their parents


@dataclass(slots=True)
class Host:
    name: str
    address: str
    cpus: int
    init: subprocess.Popen[bytes]
    pid: int
    """of its first process, with which it ends"""


class Hosts:
    """Use as a context manager. `hosts[0]` is the head of the Ray cluster."""

    def __init__(self, cpus: Sequence[int], *, folder: Path) -> None:
        """`cpus[i]`: what host i offers to Ray; in `folder` each has a directory for its Ray files."""
        self._cpus = list(cpus)
        self._folder = folder
        self._hosts: list[Host] = []
        self._switch: tuple[subprocess.Popen[bytes], int] | None = None
        self.environment = {
            **os.environ,
            **HEALTH,
            "RAY_ADDRESS": f"{NETWORK}.1:{PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

    def __enter__(self) -> "Hosts":
        reason = why_not()
        if reason is not None:
            raise RuntimeError(reason)
        try:
            self._switch = _isolated()
            self._on_switch("ip link add name bridge type bridge && ip link set bridge up")
            for cpus in self._cpus:
                self._plug_in(cpus)
            self._wait(0, self.start_ray(0))
            for index, started in [(index, self.start_ray(index)) for index in range(1, len(self._hosts))]:
                self._wait(index, started)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self._hosts:
            _end(host.init, host.pid)
        if self._switch is not None:
            _end(*self._switch)

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def add(self, cpus: int) -> int:
        """Another host, which joins the cluster; returns its index."""
        self._plug_in(cpus)
        index = len(self._hosts) - 1
        self._wait(index, self.start_ray(index))
        return index

    def run(self, index: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, in the current directory or `cwd`."""
        host = self._hosts[index]
        folder = options.pop("cwd", Path.cwd())
        enter = ["nsenter", f"--target={host.pid}", "--net", "--uts", "--mount", "--pid", f"--wd={folder}", "--"]
        return subprocess.Popen([*enter, *command], env=options.pop("env", self.environment), **options)

    def start_ray(self, index: int) -> subprocess.Popen[Any]:
        host = self._hosts[index]
        role = [f"--address={NETWORK}.1:{PORT}"]
        if index == 0:
            role = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--disable-usage-stats"]
        ray += [f"--node-ip-address={host.address}", f"--num-cpus={host.cpus}", "--object-store-memory=100000000"]
        with open(self._said(index), "wb") as said:  # no pipe: what it leaves running would hold that open
            return self.run(index, ray, stdout=said, stderr=said, stdin=subprocess.DEVNULL)

    def cut(self, index: int) -> None:
        """Unplug the host: nothing gets through any more, and nobody is told."""
        self._on_switch(f"ip link set port{index} down")

    def mend(self, index: int) -> None:
        self._on_switch(f"ip link set port{index} up")

    def kill(self, index: int) -> None:
        """The host is gone, with all that ran on it."""
        _end(self._hosts[index].init, self._hosts[index].pid)

    def _plug_in(self, cpus: int) -> None:
        index = len(self._hosts)
        init, pid = _isolated()
        host = Host(f"host-{index}", f"{NETWORK}.{index + 1}", cpus, init, pid)
        self._hosts.append(host)
        self._on_switch(
            f"ip link add port{index} type veth peer name eth0 netns {pid} && "
            f"ip link set port{index} master bridge && ip link set port{index} up"
        )
        # Ray finds a host's address by the route to the outside, which leads nowhere here.
        script = [
            f"hostname {host.name}",
            "ip link set lo up",
            f"ip address add {host.address}/24 dev eth0",
            "ip link set eth0 up",
            "ip route add default dev eth0",
            *self._mounts(index),
        ]
        _enter(pid, ("--net", "--uts", "--mount"), " && ".join(script))

    def _mounts(self, index: int) -> list[str]:
        """What a host has for itself: its Ray files, the names it knows, and no name server.

        Its own name stands for a loopback address, as Debian has it: who takes that for an address is found out.
        """
        own = self._folder / f"host-{index}"
        (own / "ray").mkdir(parents=True, exist_ok=True)
        Path("/tmp/ray").mkdir(exist_ok=True)
        others = [f"{NETWORK}.{i + 1} host-{i}" for i in range(MOST_HOSTS) if i != index]
        (own / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 host-{index}", *others, ""]))
        (own / "resolv.conf").write_text("")
        mounts = {"ray": "/tmp/ray", "hosts": "/etc/hosts", "resolv.conf": "/etc/resolv.conf"}
        return [f"mount --bind {shlex.quote(str(own / name))} {place}" for name, place in mounts.items()]

    def _on_switch(self, script: str) -> None:
        assert self._switch is not None, "there is no switch yet"
        _enter(self._switch[1], ("--net",), script)

    def _said(self, index: int) -> Path:
        return self._folder / f"{self._hosts[index].name}.log"

    def _wait(self, index: int, started: subprocess.Popen[Any]) -> None:
        if started.wait(timeout=START_SECONDS) != 0:
            raise RuntimeError(f"ray start failed on {self._hosts[index].name}: {self._said(index).read_text()}")


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    try:
        probe = [*ISOLATE, "ip", "link", "add", "name", "probe", "type", "bridge"]
        done = subprocess.run(probe, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error.filename} is missing (packages util-linux and iproute2)"
    if done.returncode != 0:
        return f"namespaces are not allowed here: {done.stderr.strip()}"
    return None


def _isolated() -> tuple[subprocess.Popen[bytes], int]:
    """A process in namespaces of its own, and the id of the first process inside. It dies with this one."""
    command = ["setpriv", "--pdeathsig=KILL", *ISOLATE, "sh", "-c", INIT]
    # On its end unshare complains of a signal mask, whatever happened.
    holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    while not (found := children.read_text().split()) or not _is_shell(int(found[0])):
        if holder.poll() is not None:
            raise RuntimeError("a host could not be made")
        time.sleep(0.01)
    return holder, int(found[0])


def _is_shell(pid: int) -> bool:
    """Whether unshare has set everything up and made way for the shell."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "sh"
    return False


def _end(holder: subprocess.Popen[bytes], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    holder.wait()


def _enter(pid: int, namespaces: Sequence[str], script: str) -> None:
    command = ["nsenter", f"--target={pid}", *namespaces, "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{script}: {done.stderr.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpus", default="1,1,1", help="what each host offers to Ray; as many hosts as numbers")
    parser.add_argument("command", nargs="+", help="runs on the first host")
    arguments = parser.parse_args()
    if os.geteuid() != 0:  # root of a user namespace may do all that is needed
        os.execvp("unshare", ["unshare", "--user", "--map-root-user", sys.executable, *sys.argv])
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cpus = [int(number) for number in arguments.cpus.split(",")]
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, Hosts(cpus, folder=Path(folder)) as hosts:
        process = hosts.run(0, arguments.command)
        try:
            return process.wait()
        except KeyboardInterrupt:  # the command got it too, from the terminal
            process.send_signal(signal.SIGINT)
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
