"""The hosts themselves, without Ray on them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

HOSTS = Path(__file__).parents[2] / "launch" / "hosts.py"
REACH = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))"
LISTEN = """
import socket
listener = socket.create_server(("10.77.0.2", 7000))
print("listening", flush=True)
while True:
    listener.accept()
"""
MAKE_AND_WAIT = """
import pathlib, runpy, sys, time
Hosts = runpy.run_path(sys.argv[1])["Hosts"]
class Bare(Hosts):
    def start_ray(self, index):
        return self.run(index, ["true"])
with Bare([1], folder=pathlib.Path(sys.argv[2])) as hosts:
    hosts.run(0, ["sleep", "1000"])
    print(hosts[0].pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def pair(hosts_module: Any, tmp_path: Path) -> Iterator[Any]:
    class Bare(hosts_module.Hosts):  # type: ignore[misc]
        def start_ray(self, index: int) -> subprocess.Popen[bytes]:
            return self.run(index, ["true"])

    with Bare([1, 1], folder=tmp_path) as hosts:
        yield hosts


def reaches(hosts: Any, sender: int, address: str, *, seconds: float) -> bool:
    return (
        hosts.run(sender, [sys.executable, "-c", REACH, address, str(seconds)], stderr=subprocess.DEVNULL).wait() == 0
    )


def test_hosts_reach_each_other_until_a_link_is_cut(pair: Any) -> None:
    names = [pair.run(i, ["hostname"], stdout=subprocess.PIPE).communicate()[0].decode().strip() for i in (0, 1)]
    assert names == ["host-0", "host-1"]
    listener = pair.run(1, [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
    assert listener.stdout.readline() == b"listening\n"
    assert reaches(pair, 0, "10.77.0.2", seconds=20)
    pair.cut(1)
    assert not reaches(pair, 0, "10.77.0.2", seconds=0.5)
    pair.mend(1)
    assert reaches(pair, 0, "10.77.0.2", seconds=20)
    pair.kill(1)
    assert listener.wait(timeout=20) != 0, "a process outlived its host"
    assert not reaches(pair, 0, "10.77.0.2", seconds=0.5)


def test_hosts_are_gone_with_who_made_them(hosts_module: Any, tmp_path: Path) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKE_AND_WAIT, HOSTS, tmp_path], stdout=subprocess.PIPE)
    assert maker.stdout is not None
    init = psutil.Process(int(maker.stdout.readline()))
    inside = [init, *init.children(recursive=True)]
    maker.kill()
    _, alive = psutil.wait_procs(inside, timeout=20)
    assert not alive
    maker.communicate()
