"""The leader's hold on the other ranks of its tensor-parallel group, which are processes on the same machine.

All ranks are one failure unit: when a follower dies, whatever the leader does next with the group raises, and `check`
says so at once to whoever asks while the engine is idle. When the leader dies, the followers end with it.
"""

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inference.follower import PROGRESS
from inference.model.decoder import Decoder
from inference.model.tensor_parallel import TensorParallel, join_group
from inference.runner import RunnerConfig
from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import EngineConfig

_PACKAGES = str(Path(__file__).parents[1])  # found by the followers whatever their current directory holds


class Followers:
    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; `join` and `start` come next."""
        self._config = config
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._lost: str | None = None
        self._changed = threading.Condition()
        self._num_messages = 0
        self._ranks: TensorParallel | None = None
        self._commands: list[Connection] = []
        self._weights: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._close = weakref.finalize(self, _dismiss, self._commands, self._weights, self._processes)
        for rank in range(1, config.tensor_parallel_size):
            commands, weights = self._start_process()
            device = device_of(config, rank)
            commands.send({"config": config, "rank": rank, "device": device, "store_port": self._store.port})
            watch = threading.Thread(target=_watch, args=(weakref.ref(self), rank, commands), daemon=True)
            watch.start()
            self._commands.append(commands)
            self._weights.append(weights)

    def join(self) -> TensorParallel:
        """The group, once all are in it."""
        self._wait_for_messages(len(self._processes))
        size = self._config.tensor_parallel_size
        self._ranks = join_group(0, size, self._store, torch.device(device_of(self._config, 0)))
        return self._ranks

    def start(self, runner: RunnerConfig) -> None:
        """Each makes its runner, once it holds its part of the model; the leader makes its own at the same time."""
        self._wait_for_messages(2 * len(self._processes))
        self._send(runner)

    def tell(self, method: str, *args: Any) -> None:
        """All call this method of their runner, or of themselves, after those told before."""
        self._send((method, args))

    def stage(self, tensors: Mapping[str, torch.Tensor], decoder: Decoder) -> None:
        """Hand each rank its part of an update, from any thread, while steps go on; it is served from `commit` on."""
        try:
            for rank, weights in enumerate(self._weights, start=1):
                weights.send("stage")
                for name in decoder.tensors:
                    part = decoder.shard(name, rank).of(tensors[name]).contiguous().cpu()
                    weights.send_bytes(part.view(torch.uint8).reshape(-1).numpy())
            for weights in self._weights:
                weights.recv()
        except (OSError, EOFError) as error:
            raise WorkerError(f"a tensor-parallel follower is gone: {self._lost or error}") from None

    def check(self) -> None:
        """Raises WorkerError once a follower is lost."""
        if self._lost is not None:
            raise WorkerError(self._lost)

    def close(self) -> None:
        self._close()

    def _start_process(self) -> tuple[Connection, Connection]:
        pipes = [Pipe(), Pipe()]
        descriptors = [theirs.fileno() for _, theirs in pipes]
        paths = [_PACKAGES, os.environ.get("PYTHONPATH", "")]
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "inference.follower", *map(str, descriptors)],
                pass_fds=descriptors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                start_new_session=True,  # Ctrl-C is the leader's to answer
            )
        )
        for _, theirs in pipes:
            theirs.close()
        return pipes[0][0], pipes[1][0]

    def _send(self, message: object) -> None:
        self.check()
        try:
            for commands in self._commands:
                commands.send(message)
        except OSError as error:
            raise WorkerError(f"a tensor-parallel follower is gone: {self._lost or error}") from None

    def _wait_for_messages(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self._num_messages == count)
        self.check()

    def _note(self, rank: int, message: str | None) -> None:
        """`message` None: its channel ended."""
        with self._changed:
            if message in PROGRESS:
                self._num_messages += 1
            elif self._lost is None:
                self._lost = f"tensor-parallel rank {rank} of {self._config.tensor_parallel_size} " + (
                    "died" if message is None else f"failed: {message}"
                )
            self._changed.notify_all()
        if self._lost is not None and self._ranks is not None and self._config.device == "cuda":
            self._ranks.abort()  # gloo sees by itself that a member is gone, NCCL does not


def device_of(config: EngineConfig, rank: int) -> str:
    several = config.device == "cuda" and config.tensor_parallel_size > 1
    return f"cuda:{rank}" if several else config.device


def _watch(followers: "weakref.ref[Followers]", rank: int, commands: Connection) -> None:
    """Holds no reference while it waits, so that a forgotten engine's followers end."""
    message: str | None = PROGRESS[0]
    while message in PROGRESS:
        try:
            message = commands.recv()
        except (OSError, EOFError):
            message = None
        owner = followers()
        if owner is None:
            return
        owner._note(rank, message)
        del owner


def _dismiss(commands: list[Connection], weights: list[Connection], processes: "list[subprocess.Popen[bytes]]") -> None:
    for channel in commands:
        try:
            channel.send(None)
        except OSError:  # it is gone already
            continue
    for channel in weights:
        channel.close()
    for process in processes:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
