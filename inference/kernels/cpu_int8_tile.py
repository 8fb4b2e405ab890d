"""Products of int8 weight rows with 16-bit tokens, in blocks of registers like `inference.kernels.cpu_tile`.

One instruction adds four products of bytes for each of a vector of tokens. It multiplies unsigned by signed, so a
token's number q, of -32767 to 32767, is stored as the two bytes of q + 32768, and every weight row ends with what takes
that out again:

    tokens   [panel, high byte | low byte, feature / 4, lane, 4] uint8, and a float32 scale for each token
    weights  [row, feature / 4, 4] int8, then the row's float32 scale, then -128 times the sum of its weights, int32

A weight is read once for both bytes, and a step with few tokens is bound by reading weights: the second byte costs
little there. Tokens in 8 bits would lose what weights in 8 bits keep (docs/numerics.md).

The sums are exact integers: a token's result is the same alone and in any batch, whatever the block. All addresses and
steps here are in words of 4 bytes.

Twin: `inference.quantization.int8`.
"""

from typing import Any, Literal

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.kernels.cpu_ir import F32, I32, broadcast, integer, load, loop, offset, prefetch, splat, store
from inference.kernels.cpu_tile import LANES

ROW_TAIL = 2  # words of a weight row behind its weights: scale, correction
LEVELS = 32767.0  # of a token, to either side
SMALLEST = 1e-30  # what the largest value of a token counts as at least: its reciprocal stays finite

_FEATURES = binding.get_host_cpu_features()


def _has(*names: str) -> bool:
    return all(_FEATURES.get(name, False) for name in names)


Dot = Literal[0, 1]
PAIRS, VNNI = 0, 1  # two products of 16-bit numbers, or four of bytes, in one instruction
DOT = VNNI if _has("avx512vnni", "avx512vl") or _has("avxvnni") else PAIRS
WIDE = 16 if _has("avx512vnni") else 8  # tokens of a vector register
SUPPORTED = _has("avx2")

_BYTES_ARE_TYPED = binding.llvm_version_info >= (22,)  # before, the instruction took its bytes as 32-bit words


@intrinsic(prefer_literal=True)
def product(  # type: ignore[no-untyped-def]
    typing_context,
    weights,
    groups,
    tokens,
    scales,
    out,
    out_step,
    out_panel,
    num_blocks,
    ahead,
    rows,
    panels,
    lanes,
    dot,
):
    """`num_blocks` blocks of `rows` outputs, in float32, for the first `lanes` tokens of each of `panels` panels.

    `scales` [panel, lane] of the tokens; `ahead` as in `inference.kernels.cpu_tile.product`.
    """
    shape = [t.literal_value for t in (rows, panels, lanes)]
    kind = dot.literal_value
    signature = types.void(*[types.int64] * 9, rows, panels, lanes, dot)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        weights, groups, tokens, scales, out, out_step, out_panel, blocks, ahead = args[:9]
        row = builder.add(groups, integer(ROW_TAIL))
        with cgutils.for_range(builder, blocks) as row_loop:
            first = builder.mul(row_loop.index, integer(shape[0]))
            _tile(
                builder,
                shape,
                kind,
                [offset(builder, weights, builder.mul(row, builder.add(first, integer(r)))) for r in range(shape[0])],
                builder.mul(ahead, builder.mul(row, integer(shape[0]))),
                groups,
                (tokens, scales),
                (offset(builder, out, builder.mul(first, out_step)), out_step, out_panel),
            )
        return _context.get_dummy_value()

    return signature, generate


def _tile(
    builder: Any, shape: list[int], dot: int, weight_rows: list[Any], ahead: Any, groups: Any, tokens: Any, out: Any
) -> None:
    rows, panels, lanes = shape
    ints, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    plane = builder.mul(groups, integer(LANES))
    planes = [offset(builder, tokens[0], builder.mul(plane, integer(p))) for p in range(2 * panels)]
    tails = [offset(builder, row, groups) for row in weight_rows]
    following = offset(builder, weight_rows[0], ahead)

    def word(address: Any) -> Any:
        return broadcast(builder, load(builder, address, I32), ints)

    def visit(index: Any, sums: list[Any]) -> list[Any]:
        prefetch(builder, offset(builder, following, builder.mul(index, integer(rows))))
        at = builder.mul(index, integer(LANES))
        xs = [_token_operand(builder, load(builder, offset(builder, start, at), ints), dot) for start in planes]
        found = []
        for r in range(rows):
            w = _weight_operand(builder, word(offset(builder, weight_rows[r], index)), dot)
            found += [_dot(builder, sums[r * len(xs) + v], x, w, dot) for v, x in enumerate(xs)]
        return found

    corrections = [word(offset(builder, tail, integer(1))) for tail in tails]
    starts = [start for correction in corrections for start in [correction, splat(0, ints)] * panels]
    sums = [builder.sitofp(total, floats) for total in loop(builder, groups, starts, visit)]
    for r in range(rows):
        scale = broadcast(builder, load(builder, tails[r], F32), floats)
        for p in range(panels):
            high, low = sums[2 * (r * panels + p) : 2 * (r * panels + p) + 2]
            value = builder.fadd(builder.fmul(high, splat(256.0, floats)), low)
            token_scale = load(builder, offset(builder, tokens[1], integer(p * LANES)), floats)
            value = builder.fmul(builder.fmul(value, scale), token_scale)
            at = builder.add(builder.mul(out[1], integer(r)), builder.mul(out[2], integer(p)))
            store(builder, value, offset(builder, out[0], at))


def _token_operand(builder: Any, x: Any, dot: int) -> Any:
    """Bytes as they are; or, as pairs of 16-bit numbers, the even ones and the odd ones."""
    if dot == VNNI:
        return x
    low = splat(0x00FF00FF, x.type)
    return builder.and_(x, low), builder.and_(builder.lshr(x, splat(8, x.type)), low)


def _weight_operand(builder: Any, w: Any, dot: int) -> Any:
    if dot == VNNI:
        return w
    halves = ir.VectorType(ir.IntType(16), 2 * w.type.count)
    pairs, eight = builder.bitcast(w, halves), splat(8, halves)
    even = builder.ashr(builder.shl(pairs, eight), eight)
    return builder.bitcast(even, w.type), builder.bitcast(builder.ashr(pairs, eight), w.type)


def _dot(builder: Any, total: Any, x: Any, w: Any, dot: int) -> Any:
    """Exact: a sum of two or four products fits, and so does that of 65536 features."""
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
def quantize(typing_context, x, features, bytes_out, scale_out):  # type: ignore[no-untyped-def]
    """A panel [feature, lane] of floats as bytes [2, feature / 4, lane, 4] and a scale for each lane.

    A token's scale follows from its own largest value alone. What is not finite makes its scale so.
    """
    floats, ints = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, features, bytes_out, scale_out = args
        lanes, last = integer(LANES), builder.sub(features, integer(1))
        groups = builder.lshr(builder.add(features, integer(3)), integer(2))

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
        # Added to a number of at most 32767, this leaves it, rounded to even and 32768 larger, in the lowest bytes.
        magic = splat(3.0 * 2**22 + 2**15, floats)

        def pack(group: Any, _state: list[Any]) -> list[Any]:
            words = [splat(0, ints), splat(0, ints)]
            for place in range(4):
                feature = builder.add(builder.mul(group, integer(4)), integer(place))
                feature = builder.select(builder.icmp_signed("<", feature, last), feature, last)  # weights there are 0
                rounded = builder.bitcast(builder.fadd(builder.fmul(value(feature, floats), inverse), magic), ints)
                for index, shift in enumerate((8, 0)):
                    byte = builder.and_(builder.lshr(rounded, splat(shift, ints)), splat(0xFF, ints))
                    words[index] = builder.or_(words[index], builder.shl(byte, splat(8 * place, ints)))
            for index, word in enumerate(words):
                at = builder.mul(builder.add(group, builder.mul(groups, integer(index))), lanes)
                store(builder, word, offset(builder, bytes_out, at))
            return []

        loop(builder, groups, [], pack)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
