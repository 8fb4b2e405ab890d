"""Keys and values in int8: written with a scale for each token and head, and read back as floats, a block at a time.

What a block of a head holds says `inference.model.kv_int8`, the twin. Attention reads a block for all queries that
share its head, so turning it into floats is done once for them.
"""

import numpy as np

from inference.kernels.compiling import exact
from inference.kernels.cpu_math import floats, signed_bytes

U = np.uint64  # an unsigned index needs no test for a negative one, which would keep a loop from vectorising


@exact
def store_int8(x_D, head, block_size, place, first, step):  # type: ignore[no-untyped-def]
    """One vector as every `step`-th of the numbers at address `head`, from `first` on. What is not finite makes its
    scale so."""
    size = len(x_D)
    largest, poison = np.float32(1e-30), np.float32(0)
    for d in range(size):
        largest = max(largest, abs(x_D[U(d)]))
        poison += x_D[U(d)] * np.float32(0)
    # In float64, then rounded: the compiler's float32 quotient may be off in the last digit.
    inverse = np.float32(127.0 / np.float64(largest))
    numbers = signed_bytes(head, block_size * size)
    for d in range(size):
        numbers[U(first + d * step)] = np.int8(np.rint(x_D[U(d)] * inverse))
    floats(head + block_size * size, block_size)[place] = np.float32(np.float64(largest) / 127.0) + poison


@exact
def unpack_keys(head, block_size, head_dim, out_X):  # type: ignore[no-untyped-def]
    """[D, S]"""
    numbers, scales = signed_bytes(head, block_size * head_dim), floats(head + block_size * head_dim, block_size)
    for d in range(head_dim):
        for s in range(block_size):
            out_X[U(d * block_size + s)] = np.float32(numbers[U(d * block_size + s)]) * scales[U(s)]


@exact
def unpack_values(head, block_size, head_dim, first, count, out_X):  # type: ignore[no-untyped-def]
    """[count, D], of the tokens from place `first` on"""
    numbers, scales = signed_bytes(head, block_size * head_dim), floats(head + block_size * head_dim, block_size)
    for s in range(count):
        scale = scales[U(first + s)]
        for d in range(head_dim):
            out_X[U(s * head_dim + d)] = np.float32(numbers[U((first + s) * head_dim + d)]) * scale
