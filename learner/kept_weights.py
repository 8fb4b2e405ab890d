"""Weights of a policy version on disk, without the optimizer: written from the buckets of its update, read from there,
from a checkpoint, or from a Hugging Face folder."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from learner.room import not_written
from olmorl.contract.errors import ConfigError
from olmorl.file_mode import open_to_readers

_MODEL = "model.causal_lm."  # what stands before a Hugging Face name in a checkpoint


def write_weights(path: Path, named: Iterable[tuple[str, Tensor]]) -> None:
    """One safetensors file; it appears whole or not at all, then with a WorkerError."""
    part = path.with_name(f".{path.name}.part")
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in named}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part)
        open_to_readers(part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        raise not_written(str(path), error, folder=path.parent, num_bytes=num_bytes) from None


def read_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor), in the dtype they are stored in: of a safetensors file, the folder of a learner's
    checkpoint, or a Hugging Face folder. ConfigError for anything else."""
    if (path / ".metadata").is_file():
        yield from _of_checkpoint(path)
        return
    files = [path] if path.suffix == ".safetensors" and path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path} holds no weights: neither safetensors nor a learner's checkpoint")
    for file in files:
        yield from load_file(file).items()


def _of_checkpoint(folder: Path) -> Iterator[tuple[str, Tensor]]:
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    for key, tensor in state.items():
        yield key.removeprefix(_MODEL), tensor
