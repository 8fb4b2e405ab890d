"""What every compiled kernel shares: exp in a form that vectorises, arrays at an address and back."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from inference.kernels.compiling import exact


@intrinsic
def _float_of_bits(typing_context, bits):  # type: ignore[no-untyped-def]
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def fused(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def _byte_pointer(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.int8)(types.int64), generate


@numba.njit(inline="always")
def address(array):  # type: ignore[no-untyped-def]
    """Signed, because numba makes a float of an unsigned and a signed integer together."""
    return np.int64(array.ctypes.data)


@exact
def floats(start, count):  # type: ignore[no-untyped-def]
    """The float32 array at an address."""
    return numba.carray(_pointer(start), (count,))


@exact
def signed_bytes(start, count):  # type: ignore[no-untyped-def]
    return numba.carray(_byte_pointer(start), (count,))


@exact
def exp(x):  # type: ignore[no-untyped-def]
    """To about 1 ulp for x in [-87, 88], clamped outside; NaN stays NaN."""
    if x < np.float32(-87.0):  # not max() and min(), which would swallow a NaN
        x = np.float32(-87.0)
    if x > np.float32(88.0):
        x = np.float32(88.0)
    whole = np.floor(fused(x, np.float32(1.44269504), np.float32(0.5)))
    r = fused(whole, np.float32(-0.693359375), x)
    r = fused(whole, np.float32(2.12194440e-4), r)
    p = np.float32(1.9875691500e-4)
    p = fused(p, r, np.float32(1.3981999507e-3))
    p = fused(p, r, np.float32(8.3334519073e-3))
    p = fused(p, r, np.float32(4.1665795894e-2))
    p = fused(p, r, np.float32(1.6666665459e-1))
    p = fused(p, r, np.float32(5.0000001201e-1))
    power = _float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
    return (fused(p, r * r, r) + np.float32(1.0)) * power
