"""A rank of a tensor-parallel group that only follows: a process that repeats what the leader's runner does, on its own
part of the model.

Started by `inference.followers` as `python -P -m inference.follower COMMANDS WEIGHTS` (file descriptors). Commands are
names of methods with their arguments. Weights come beside them and are staged by a thread of their own, while steps go
on. When the leader closes or dies, either channel ends and so does this process, whatever it does.
"""

import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from inference.model.load import load_decoder, resolve_folder
from inference.model.tensor_parallel import join_group
from inference.runner import Runner
from olmorl.contract.generation import EngineConfig

PROGRESS = ("here", "loaded")
"""what a follower says while it starts; anything else is an error"""


class Follower:
    def __init__(self, config: EngineConfig, *, rank: int, device: str, store_port: int) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        self.decoder = load_decoder(
            resolve_folder(config.model),
            dtype=config.dtype,
            device=device,
            max_model_len=config.max_model_len,
            kernels=config.kernels,
            ranks=join_group(rank, config.tensor_parallel_size, store, torch.device(device)),
        )
        self._staged: dict[str, torch.Tensor] = {}

    def follow(self, commands: Connection) -> None:
        """Until the leader says None."""
        commands.send("loaded")
        runner = Runner(self.decoder, commands.recv())  # as the leader does now: graphs are captured together
        while (command := commands.recv()) is not None:
            name, args = command
            getattr(self if name in ("commit", "collect") else runner, name)(*args)

    def stage(self, weights: Connection) -> None:
        """Take one update, tensor by tensor, and say that it is there."""
        staged: dict[str, torch.Tensor] = {}
        for name, tensor in self.decoder.tensors.items():
            part = torch.empty(tensor.shape, dtype=tensor.dtype)
            weights.recv_bytes_into(part.view(torch.uint8).reshape(-1).numpy())
            staged[name] = part.to(self.decoder.device)
        self._staged = staged
        weights.send(len(staged))

    @torch.inference_mode()
    def commit(self) -> None:
        """In place, between two steps, like the leader."""
        staged, self._staged = self._staged, {}
        for name, tensor in self.decoder.tensors.items():
            tensor.copy_(staged[name])

    def collect(self) -> None:
        self.decoder.whole_tensors()


def main(commands: Connection, weights: Connection) -> None:
    follower: Follower | None = None

    def stage_for_ever() -> None:
        try:
            while True:
                weights.recv()
                assert follower is not None, "nothing is staged before the first step"
                follower.stage(weights)
        except EOFError:
            os._exit(0)  # the leader is gone, also for a main thread that waits in a collective
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=stage_for_ever, name="weights", daemon=True).start()
    try:
        commands.send("here")
        options = commands.recv()
        follower = Follower(**options)
        follower.follow(commands)
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        commands.send(f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)  # whatever threads of libraries still wait for


if __name__ == "__main__":
    main(*(Connection(int(descriptor)) for descriptor in sys.argv[1:3]))
