"""Products of bytes in vector registers, and tokens as the bytes that they take.

One instruction adds four products of bytes for each of a vector of tokens, unsigned ones times signed ones. A token's
number q, of -32639 to 32639 (`inference.quantization.rows`), is 256 * high + low with both digits in -127 to 128, and
stored as the two bytes high + 128 and low + 128; or, `signed`, as high and low themselves:

    tokens   [panel, high | low, feature / 4, lane, 4], and a float32 scale for each token

A weight is read once for both bytes, and a step with few tokens is bound by reading weights: the second byte costs
little there. Tokens in 8 bits would lose what weights in 8 bits keep (docs/numerics.md). What stands behind the last
feature counts as 0.
"""

from typing import Any, Literal

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.kernels.cpu_ir import F32, I32, integer, load, loop, offset, splat, store
from inference.kernels.cpu_target import has
from inference.kernels.cpu_tile import LANES

LEVELS = 32639.0  # of a token, to either side
SMALLEST = 1e-30  # what the largest value of a token counts as at least: its reciprocal stays finite

Dot = Literal[0, 1]
PAIRS, VNNI = 0, 1  # two products of 16-bit numbers, or four of bytes, in one instruction
DOT = VNNI if has("avx512vnni", "avx512vl") or has("avxvnni") else PAIRS
WIDE = 16 if has("avx512vnni") else 8  # tokens of a vector register
SUPPORTED = has("avx2")

_BYTES_ARE_TYPED = binding.llvm_version_info >= (22,)  # before, the instruction took its bytes as 32-bit words


def unsigned(builder: Any, x: Any, dot: int) -> Any:
    """Unsigned bytes as `multiply_add` takes them: as they are, or the even and the odd ones as pairs of 16 bits."""
    if dot == VNNI:
        return x
    low = splat(0x00FF00FF, x.type)
    return builder.and_(x, low), builder.and_(builder.lshr(x, splat(8, x.type)), low)


def signed(builder: Any, w: Any, dot: int) -> Any:
    if dot == VNNI:
        return w
    halves = ir.VectorType(ir.IntType(16), 2 * w.type.count)
    pairs, eight = builder.bitcast(w, halves), splat(8, halves)
    even = builder.ashr(builder.shl(pairs, eight), eight)
    return builder.bitcast(even, w.type), builder.bitcast(builder.ashr(pairs, eight), w.type)


def multiply_add(builder: Any, total: Any, x: Any, w: Any, dot: int) -> Any:
    """total + x w of `unsigned` x and `signed` w. Exact: a sum of 65536 features fits."""
    count = total.type.count
    if dot == VNNI:
        kind = ir.VectorType(ir.IntType(8), 4 * count) if _BYTES_ARE_TYPED else total.type
        name = f"llvm.x86.avx512.vpdpbusd.{32 * count}"
        call = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(total.type, [total.type, kind, kind]), name
        )
        return builder.call(call, [total, builder.bitcast(x, kind), builder.bitcast(w, kind)])
    halves = ir.VectorType(ir.IntType(16), 2 * count)
    name = "llvm.x86.avx2.pmadd.wd"
    call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(total.type, [halves, halves]), name)
    for some_x, some_w in zip(x, w, strict=True):
        products = builder.call(call, [builder.bitcast(some_x, halves), builder.bitcast(some_w, halves)])
        total = builder.add(total, products)
    return total


@intrinsic
def quantize(typing_context, x, features, quads, signed, bytes_out, scale_out):  # type: ignore[no-untyped-def]
    """A panel [feature, lane] of floats as bytes [2, quads, lane, 4] and a scale for each lane.

    A token's scale follows from its own largest value alone. What is not finite makes its scale so.
    """
    floats, ints = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, features, quads, signed, bytes_out, scale_out = args
        lanes, last = integer(LANES), builder.sub(features, integer(1))
        is_signed = builder.icmp_signed("!=", signed, integer(0))
        flipped = builder.select(is_signed, splat(-0x7F7F7F80, ints), splat(0, ints))  # all four highest bits

        def value(feature: Any, kind: Any) -> Any:
            return load(builder, offset(builder, x, builder.mul(feature, lanes)), kind)

        def larger(feature: Any, state: list[Any]) -> list[Any]:
            # As integers: NaN is then larger than infinity, and that than any number.
            bits = builder.and_(value(feature, ints), splat(0x7FFFFFFF, ints))
            return [builder.select(builder.icmp_signed(">", bits, state[0]), bits, state[0])]

        smallest = builder.bitcast(splat(SMALLEST, floats), ints)
        (bits,) = loop(builder, features, [smallest], larger)
        largest, levels = builder.bitcast(bits, floats), splat(LEVELS, floats)
        store(builder, builder.fdiv(largest, levels), scale_out)
        inverse = builder.fdiv(levels, largest)
        # Added to a number of at most 32639, this leaves it, rounded to even and larger by 128 times 256 and by 128, in
        # the lowest bytes.
        magic = splat(3.0 * 2**22 + 2**15 + 2**7, floats)

        def pack(group: Any, _state: list[Any]) -> list[Any]:
            words = [splat(0, ints), splat(0, ints)]
            for place in range(4):
                feature = builder.add(builder.mul(group, integer(4)), integer(place))
                there = builder.icmp_signed("<=", feature, last)
                scaled = builder.fmul(value(builder.select(there, feature, last), floats), inverse)
                scaled = builder.select(there, scaled, splat(0.0, floats))
                rounded = builder.bitcast(builder.fadd(scaled, magic), ints)
                for index, shift in enumerate((8, 0)):
                    byte = builder.and_(builder.lshr(rounded, splat(shift, ints)), splat(0xFF, ints))
                    words[index] = builder.or_(words[index], builder.shl(byte, splat(8 * place, ints)))
            for index, word in enumerate(words):
                at = builder.mul(builder.add(group, builder.mul(quads, integer(index))), lanes)
                store(builder, builder.xor(word, flipped), offset(builder, bytes_out, at))
            return []

        loop(builder, quads, [], pack)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate
