"""What runs inside each Ray actor: one inference or learner worker.

Whatever goes wrong in there leaves as one of `olmorl.contract.errors`, so that the driver never unpickles a torch
exception.
"""

import contextlib
import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from olmorl.contract.errors import OlmoRLError, WorkerError


class WorkerProcess:
    """Runs inside a Ray actor; `target` is "module:Class" of the worker it holds."""

    def __init__(self, log_path: str) -> None:
        _redirect_output(Path(log_path))
        _use_network_of_cluster()
        self._worker: Any = None

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def start(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module, _, name = target.partition(":")
        with _only_our_errors():
            self._worker = getattr(importlib.import_module(module), name)(*args, **kwargs)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        with _only_our_errors():
            return getattr(self._worker, method)(*args)


@contextlib.contextmanager
def _only_our_errors() -> Iterator[None]:
    try:
        yield
    except OlmoRLError as error:
        raise type(error)(str(error)) from None
    except Exception as error:
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        raise WorkerError(f"{type(error).__name__}: {error} ({where})") from None


def _redirect_output(path: Path) -> None:
    """Send what this process prints to its own log file, where the run directory can be reached from this node."""
    if not path.parent.is_dir():
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.close(file)
    faulthandler.enable()


def _use_network_of_cluster() -> None:
    """Gloo and NCCL take the interface that this node has in the cluster, unless the environment names one.

    Gloo alone would take the address that the host's name stands for, which other nodes may not reach.
    """
    import ray

    address = ray.util.get_node_ip_address()
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
