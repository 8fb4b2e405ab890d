"""A bucket that another process of this machine maps: for one GPU, or one host, with both roles.

On CUDA the handle is the driver's (CUDA IPC). On a CPU the memory is an anonymous file, which the system frees with
the last process that has it open, however that process ends: nothing is ever left behind.
"""

import mmap
import os
import pickle

import torch

from olmorl.contract.errors import ConfigError
from olmorl.contract.weights import SharedHandle


class SharedBucket:
    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        """ConfigError where this machine cannot share memory in this way."""
        if device.type == "cuda":
            if "expandable_segments:true" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
                raise ConfigError(
                    "sync.transport = 'ipc' shares memory between processes, which PYTORCH_CUDA_ALLOC_CONF="
                    "expandable_segments:True does not allow; unset it for this run"
                )
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return
        if not hasattr(os, "memfd_create"):
            raise ConfigError("sync.transport = 'ipc' needs Linux; set sync.transport = 'gloo'")
        self._file = os.fdopen(os.memfd_create("olmorl bucket"), "r+b")
        self._file.truncate(num_bytes)
        self.data = torch.frombuffer(mmap.mmap(self._file.fileno(), num_bytes), dtype=torch.uint8)

    def handle(self) -> str:
        """What one other process needs to map the bucket; each process wants a handle of its own."""
        if self.data.is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            _, arguments = reduce_tensor(self.data)
            uuid = str(torch.cuda.get_device_properties(self.data.device).uuid)
            return pickle.dumps(SharedHandle(gpu=uuid, path="", cuda=arguments)).hex()
        return pickle.dumps(SharedHandle(gpu="", path=f"/proc/{os.getpid()}/fd/{self._file.fileno()}", cuda=())).hex()
