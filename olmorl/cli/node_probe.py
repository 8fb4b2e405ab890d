"""Run by doctor as a process on each node of a cluster: what is wrong there, and how fast is the way to the others?

Imports torch, as the workers of a run do; nothing of a command imports it.
"""

import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import olmorl
from learner.store import open_store
from olmorl.cli.finding import Finding
from olmorl.cli.machine_checks import check_machine
from olmorl.cli.package_checks import check_requirements
from olmorl.cli.torch_probe import probe_devices

COMPARED = ("torch", "transformers", "triton", "ray", "numpy", "pyarrow", "safetensors", "tokenizers")
TIMEOUT = timedelta(seconds=30)
WARM_UP_BYTES = 1 << 20


class NodeProbe:
    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._store: dist.TCPStore | None = None
        self._group: Any = None  # a bare backend, whose classes carry no types
        self._device = torch.device("cpu")

    def versions(self) -> dict[str, str]:
        found = {"olmorl": olmorl.__version__, "Python": platform.python_version()}
        for name in COMPARED:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "missing"
        return found

    def findings(self, paths: list[str]) -> list[Finding]:
        """`paths` are what the run reads; all nodes must see them."""
        return [_named(finding) for finding in self._findings(paths)]

    def _findings(self, paths: list[str]) -> Iterator[Finding]:
        yield from check_requirements()  # our own source was shipped there
        yield from check_machine(Path.cwd())
        devices: dict[str, Any] = {**probe_devices()}
        yield Finding(**devices)
        for path in paths:
            if not Path(path).exists():
                yield Finding("fail", f"{path} is not there", "put it on a file system that all nodes see, or copy it")

    def clock(self) -> float:
        return time.time()

    def host_store(self, host: str) -> int:
        """On rank 0: open the store where the probes meet, at this node's address; returns its port."""
        self._store = open_store(host)
        return self._store.port

    def join(self, backend: str, host: str, port: int) -> None:
        """Every node with every other, as ranks of a run do: "gloo" between CPUs, "nccl" between their first GPUs."""
        store = self._store or dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        meeting = dist.PrefixStore(backend, store)
        if backend == "gloo":
            self._device = torch.device("cpu")
            self._group = dist.ProcessGroupGloo(meeting, self._rank, self._size, TIMEOUT)
            return
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        self._group = dist.ProcessGroupNCCL(meeting, self._rank, self._size, options)

    def pass_on(self, sender: int, receiver: int, num_bytes: int) -> float:
        """Called on both: seconds that so many bytes take from one to the other."""
        for size in (WARM_UP_BYTES, num_bytes):
            data = torch.zeros(size, dtype=torch.uint8, device=self._device)
            began = time.perf_counter()
            if self._rank == sender:
                self._group.send([data], receiver, 0).wait()
                self._group.recv([data[:1]], receiver, 1).wait()  # the other has all of it
            else:
                self._group.recv([data], sender, 0).wait()
                self._group.send([data[:1]], sender, 1).wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        return seconds


def _named(finding: Finding) -> Finding:
    return replace(finding, what=f"{socket.gethostname()}: {finding.what}")
