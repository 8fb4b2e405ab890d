"""Sums of floats, and the highest of them, in an order of their own, so that every compilation finds the same digits.

Were the order the compiler's (LLVM's `reassoc`), digits would depend on how often it had optimised the code: the
process that compiles a kernel runs callees as they were compiled by themselves, and later ones, that read the kernel
from disk, as they were compiled into it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from inference.kernels.compiling import exact
from inference.kernels.cpu_ir import F32, I32, integer, load, loop, offset
from inference.kernels.cpu_math import address
from inference.kernels.cpu_tile import LANES

_SUM, _SQUARES, _HIGHEST = 0, 1, 2
U = np.uint64


@exact
def sum_of(x):  # type: ignore[no-untyped-def]
    """Of float32 that lie together."""
    blocks, found = len(x) // LANES, np.float32(0)
    if blocks > 0:
        found = _fold(address(x), blocks, _SUM)
    for i in range(blocks * LANES, len(x)):
        found += x[U(i)]
    return found


@exact
def sum_of_squares(x):  # type: ignore[no-untyped-def]
    """The sum of the squares of float32 that lie together."""
    blocks, found = len(x) // LANES, np.float32(0)
    if blocks > 0:
        found = _fold(address(x), blocks, _SQUARES)
    for i in range(blocks * LANES, len(x)):
        found += x[U(i)] * x[U(i)]
    return found


@exact
def highest(x):  # type: ignore[no-untyped-def]
    """Of float32 that lie together; -inf of none. NaN may be passed over."""
    blocks, found = len(x) // LANES, np.float32(-np.inf)
    if blocks > 0:
        found = _fold(address(x), blocks, _HIGHEST)
    for i in range(blocks * LANES, len(x)):
        found = max(found, x[U(i)])
    return found


@intrinsic(prefer_literal=True)
def _fold(typing_context, x, blocks, kind):  # type: ignore[no-untyped-def]
    """`blocks` vectors of `LANES` floats, lane by lane, then the upper half onto the lower one until one is left."""
    what = kind.literal_value

    def join(builder: Any, a: Any, b: Any) -> Any:
        if what == _HIGHEST:
            return builder.select(builder.fcmp_ordered(">", b, a), b, a)
        return builder.fadd(a, b)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, blocks, _ = args
        vector = ir.VectorType(F32, LANES)

        def visit(block: Any, state: list[Any]) -> list[Any]:
            value = load(builder, offset(builder, x, builder.mul(block, integer(LANES))), vector)
            return [join(builder, state[0], builder.fmul(value, value) if what == _SQUARES else value)]

        start = ir.Constant(vector, [-np.inf if what == _HIGHEST else 0.0] * LANES)
        (found,) = loop(builder, blocks, [start], visit)
        width = LANES
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(I32, width), list(range(at, at + width))) for at in (0, width)]
            undefined = ir.Constant(found.type, ir.Undefined)
            found = join(builder, *(builder.shuffle_vector(found, undefined, half) for half in halves))
        return builder.extract_element(found, ir.Constant(I32, 0))

    return types.float32(types.int64, types.int64, kind), generate
