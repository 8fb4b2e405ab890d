"""Map a bucket that lies in the memory of the sender's process, on the GPU or the machine both run on."""

import mmap
import pickle

import torch

from olmorl.contract.weights import SharedHandle


def map_bucket(handle: str, num_bytes: int, *, device: torch.device) -> torch.Tensor:
    """[num_bytes] uint8, to be read alone. RuntimeError where it cannot be reached from here."""
    shared: SharedHandle = pickle.loads(bytes.fromhex(handle))
    ours = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    if shared.gpu != ours:
        raise RuntimeError(
            f"the learner's weights are on {_place(shared.gpu)}, this engine is on {_place(ours)}, and "
            "sync.transport = 'ipc' needs one device for both"
        )
    if shared.gpu:
        return _map_cuda(shared.cuda, device)
    try:
        with open(shared.path, "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    except OSError as error:
        raise RuntimeError(
            f"the learner's memory cannot be mapped ({error}); sync.transport = 'ipc' needs learner and engines on one "
            "machine, in one process namespace"
        ) from None


def _map_cuda(arguments: tuple, device: torch.device) -> torch.Tensor:
    """The sender counts devices its own way: of its arguments the device's index is replaced by ours."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    index = torch.cuda.current_device() if device.index is None else device.index
    ours = [*arguments[:6], index, *arguments[7:]]
    return rebuild_cuda_tensor(*ours)


def _place(gpu: str) -> str:
    return f"GPU {gpu}" if gpu else "a CPU"
