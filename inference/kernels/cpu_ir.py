"""What the kernels written in LLVM's own terms share: loops that carry values in registers, and addresses."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def loop(builder: Any, count: Any, start: list[Any], visit: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`visit(index, state)` for index in [0, count), count >= 1; the last state."""
    entry, body, done = builder.block, builder.append_basic_block("visit"), builder.append_basic_block("visited")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    state = [builder.phi(value.type) for value in start]
    index.add_incoming(integer(0), entry)
    for phi, value in zip(state, start, strict=True):
        phi.add_incoming(value, entry)
    found = visit(index, state)
    following = builder.add(index, integer(1))
    index.add_incoming(following, builder.block)
    for phi, value in zip(state, found, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), body, done)
    builder.position_at_end(done)
    return found


def offset(builder: Any, address: Any, words: Any) -> Any:
    """The address so many floats, or other words of 4 bytes, further."""
    return builder.add(address, builder.shl(words, integer(2)))


def integer(value: int) -> Any:
    return ir.Constant(I64, value)


def splat(value: float, vector: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def broadcast(builder: Any, value: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, I32, I32, I32])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, second_level, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    builder.call(call, [builder.inttoptr(address, _BYTE_POINTER), read, second_level, data])
