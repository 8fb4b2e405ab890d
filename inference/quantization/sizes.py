"""How many bytes a row of weights has in each format. Without torch, for those who count and do not compute."""

from collections.abc import Callable

from olmorl.contract.generation import Quantization

GROUP = 32  # inputs of an int4 row that share a minimum and a scale
_ALIGNMENT = 16  # a GPU loads no less at once


def int8_row_bytes(num_features: int) -> int:
    return _aligned(tail_at(num_features) + 8)


def int4_row_bytes(num_features: int) -> int:
    return _aligned(num_groups(num_features) * (GROUP // 2 + 4))


ROW_BYTES: dict[Quantization, Callable[[int], int]] = {"int8": int8_row_bytes, "int4": int4_row_bytes}


def tail_at(num_features: int) -> int:
    """Of an int8 row, the byte at which its scale lies."""
    return -(-num_features // 4) * 4


def num_groups(num_features: int) -> int:
    return -(-num_features // GROUP)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
