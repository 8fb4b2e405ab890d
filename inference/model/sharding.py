"""Which part of each tensor a rank of a tensor-parallel group holds. No torch here.

Column split (query, key, value, gate, up): a rank has whole heads and some rows of the weight, and computes its part of
the output. Row split (out, down): it has the columns for that part, and the sum over ranks is the output. Embedding and
head are split by vocabulary. Key and value heads are divided, or, where there are fewer of them than ranks, replicated.
"""

from dataclasses import dataclass, replace
from typing import Any

from inference.model.architecture import Architecture
from olmorl.contract.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """`length` indices of dimension `dim`, from `start` on, of a tensor of `shape`."""

    shape: tuple[int, ...]
    dim: int
    start: int
    length: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def of(self, whole: Any) -> Any:
        """The part, a view of the tensor `whole`."""
        return whole.narrow(self.dim, self.start, self.length)


def check_divisible(arch: Architecture, size: int) -> None:
    """Raises ConfigError where the model cannot be cut into `size` parts."""
    kv_heads = arch.num_kv_heads
    for name, value in (("attention heads", arch.num_heads), ("MLP features", arch.intermediate_size)):
        if value % size:
            raise ConfigError(f"tensor_parallel_size is {size}, which does not divide the model's {value} {name}")
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"tensor_parallel_size is {size}; of the model's {kv_heads} key/value heads neither can each rank have as "
            f"many as the others, nor can each head go to as many ranks as the others"
        )
    if arch.vocab_size <= (size - 1) * -(-arch.vocab_size // size):
        raise ConfigError(f"tensor_parallel_size is {size}; the last rank would have none of {arch.vocab_size} tokens")


def local_architecture(arch: Architecture, size: int) -> Architecture:
    """What one rank's attention and MLP look like."""
    return replace(
        arch,
        num_heads=arch.num_heads // size,
        num_kv_heads=max(1, arch.num_kv_heads // size),
        intermediate_size=arch.intermediate_size // size,
    )


def shard_of(name: str, shape: tuple[int, ...], arch: Architecture, *, rank: int, size: int) -> Shard:
    """The part of the tensor with this Hugging Face name that `rank` of `size` holds."""
    *_, module, kind = name.split(".")
    if module in ("embed_tokens", "lm_head"):
        length = -(-shape[0] // size)
        return Shard(shape, 0, rank * length, min(length, shape[0] - rank * length))
    if module in ("o_proj", "down_proj"):
        return _even(shape, 1, rank, size) if kind == "weight" else _whole(shape)
    if module in ("q_proj", "gate_proj", "up_proj") or (module == "q_norm" and arch.qk_norm == "whole"):
        return _even(shape, 0, rank, size)
    if module in ("k_proj", "v_proj") or (module == "k_norm" and arch.qk_norm == "whole"):
        owners = min(size, arch.num_kv_heads)  # parts that differ
        return _even(shape, 0, rank * owners // size, owners)
    return _whole(shape)


def _even(shape: tuple[int, ...], dim: int, index: int, parts: int) -> Shard:
    length = shape[dim] // parts
    return Shard(shape, dim, index * length, length)


def _whole(shape: tuple[int, ...]) -> Shard:
    return Shard(shape, 0, 0, shape[0])
