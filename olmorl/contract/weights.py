"""Weights on the wire: names, buckets, checksums.

Learner and engine agree on Hugging Face parameter names. A model is cut once into buckets of a bounded size; an
update walks them in order. Checksums are over the bytes of the wire dtype, so that two sides that hold the same
weights say the same word whatever the bucket size.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    from xxhash import xxh3_64_intdigest as _digest
except ImportError:  # `make gpu-check`: nothing of ours is installed, and both ends are one process
    from zlib import crc32 as _digest  # type: ignore[assignment]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16" or "float16"

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors packed one behind the other; `offsets[i]` is where `tensors[i]` begins, in bytes."""

    index: int
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What every update of a run consists of, planned once."""

    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for bucket in self.buckets for spec in bucket.tensors)


ALIGNMENT = 64  # bytes; lets a receiver view each tensor inside the bucket, whatever the dtypes before it


def plan_buckets(specs: Iterable[TensorSpec], *, bucket_bytes: int = 64 << 20) -> Manifest:
    """Pack `specs` in order; a tensor larger than `bucket_bytes` gets a bucket of its own. No name may repeat."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be > 0")
    buckets: list[Bucket] = []
    names: set[str] = set()
    tensors: list[TensorSpec] = []
    offsets: list[int] = []
    used = 0

    def close() -> None:
        nonlocal used
        if tensors:
            buckets.append(Bucket(len(buckets), tuple(tensors), tuple(offsets), used))
            tensors.clear()
            offsets.clear()
            used = 0

    for spec in specs:
        if spec.name in names:
            raise ValueError(f"tensor {spec.name!r} appears twice")
        names.add(spec.name)
        size = -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
        if used and used + size > bucket_bytes:
            close()
        tensors.append(spec)
        offsets.append(used)
        used += size
    close()
    return Manifest(tuple(buckets))


def tensor_checksum(data: np.ndarray) -> int:
    """XXH3 of one tensor's bytes, 64 bits. Each process takes it of the whole model at each update; a CRC-32 would take
    it up to seven times as long. `data` is the tensor's contiguous buffer viewed as uint8. Releases the GIL."""
    return _digest(data.data)


def bucket_checksums(bucket: Bucket, data: np.ndarray) -> dict[str, int]:
    """Checksum of each tensor of a bucket that lies in `data` (uint8)."""
    parts = zip(bucket.tensors, bucket.offsets, strict=True)
    return {spec.name: tensor_checksum(data[offset : offset + spec.num_bytes]) for spec, offset in parts}


def combine_checksums(checksums: Mapping[str, int], specs: Iterable[TensorSpec]) -> str:
    """One word for a whole model, from one checksum for each tensor. Independent of order and of buckets."""
    digest = hashlib.sha256()
    for spec in sorted(specs, key=lambda s: s.name):
        digest.update(f"{spec.name} {spec.shape} {spec.dtype} {checksums[spec.name]:016x}\n".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroup:
    """Where and as whom to join the broadcast group. Rank 0 is the sender and hosts the store.

    A new membership is a new `epoch`: its keys in the store never meet those of an older one.
    """

    epoch: int
    host: str
    port: int
    rank: int
    size: int
    transport: str  # "gloo", "nccl" or "ipc"
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedHandle:
    """How to map a bucket of the sender: on a GPU, or at a path of the machine that both run on."""

    gpu: str  # uuid; "" on a CPU
    path: str  # "" on a GPU
    cuda: tuple[Any, ...]  # arguments of torch's rebuild_cuda_tensor


def shared_key(word: str, *numbers: int) -> str:
    """What sender and engines tell each other through the store of a group whose buckets they share.

    handle/<rank>/<bucket>, joined/<rank>, sent/<version>/<bucket>, taken/<version>/<rank>.
    """
    return "/".join([word, *map(str, numbers)])


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What the sender says when all buckets are on the wire."""

    version: int
    checksums: dict[str, int]  # tensor name -> checksum of what was sent
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """What an engine says once it serves the new version."""

    worker: str
    version: int
    checksum: str  # of the weights now in place
    stall_seconds: float  # how long the engine made no step because of this update
    receive_seconds: float
