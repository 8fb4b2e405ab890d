"""Engines join and leave a running job as nodes do.

A node is a raylet of this machine here, so that this runs anywhere; what a network adds is in test_hosts.py.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]


class LocalCluster:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "RAY_ADDRESS": f"127.0.0.1:{self._port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

    def add(self, cpus: int) -> int:
        role = [f"--address=127.0.0.1:{self._port}"]
        if not self._nodes:  # a folder of its own, or others on this machine would take it for theirs
            role = ["--head", f"--port={self._port}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role, f"--num-cpus={cpus}"]
        command += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000", "--disable-usage-stats"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._nodes.append(subprocess.Popen(command, env=self.environment, **quiet))
        return len(self._nodes) - 1

    def processes(self, node: int) -> list[psutil.Process]:
        try:
            top = psutil.Process(self._nodes[node].pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, node: int) -> None:
        """All at once and without a word, as when its machine is taken away."""
        for process in (found := self.processes(node)):
            process.kill()
        psutil.wait_procs(found, timeout=10)
        self._nodes[node].wait()

    def close(self) -> None:
        for node in range(len(self._nodes)):
            self.kill(node)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, for the names of sockets
    cluster = LocalCluster(folder)
    yield cluster
    cluster.close()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_node_that_joins_is_used_and_one_that_goes_is_survived(cluster: LocalCluster, make_run: Any) -> None:
    """The run starts with one engine where there is room for one. A node joins: the second engine. The node goes, and
    its work is done again by the first. Another joins: a third engine."""
    cluster.add(cpus=2)
    run = make_run(lambda command, **options: subprocess.Popen(command, env=cluster.environment, **options))
    run.start("inference.max_workers=2", "run.steps=300", "cluster.heartbeat_seconds=5")
    run.wait_for(lambda: run.steps() > 1)
    assert run.worker("inference-1") is None, "there is no room yet"
    first = cluster.add(cpus=1)
    run.wait_for(lambda: "inference-1" in run.served_last())
    cluster.kill(first)
    run.wait_for(lambda: "inference-1 is lost" in run.said())
    step = run.steps()
    run.wait_for(lambda: run.steps() > step + 1)
    cluster.add(cpus=1)
    run.wait_for(lambda: "inference-2" in run.served_last())
    run.interrupt()
    run.assert_well(run.steps() - 1)
    assert run.metrics()[-1]["faults/worker_restarts"] == 1
