"""Products of int8 weight rows with int8 tokens, in blocks of registers like `inference.kernels.cpu_tile`.

One instruction adds four products for each of a vector of tokens. It multiplies unsigned by signed bytes, so a token's
bytes carry 128 more than they mean, and every row ends with what takes that out again:

    tokens   [panel, feature / 4, lane, 4] uint8, and a float32 scale for each token
    weights  [row, feature / 4, 4] int8, then the row's float32 scale, then -128 times the sum of its weights, int32

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
from inference.kernels.cpu_tile import LANES, vectors_of

ROW_TAIL = 2  # words of a weight row behind its weights: scale, correction
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
    token_panel,
    scales,
    out,
    out_step,
    out_panel,
    num_blocks,
    ahead,
    rows,
    vectors,
    lanes,
    dot,
):
    """`num_blocks` blocks of `rows` outputs, in float32, for `vectors` vectors of `lanes` tokens.

    `scales` [panel, lane] of the tokens; `ahead` as in `inference.kernels.cpu_tile.product`.
    """
    shape = [t.literal_value for t in (rows, vectors, lanes)]
    kind = dot.literal_value
    signature = types.void(*[types.int64] * 10, rows, vectors, lanes, dot)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        weights, groups, tokens, token_panel, scales, out, out_step, out_panel, blocks, ahead = args[:10]
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
                (tokens, token_panel, scales),
                (offset(builder, out, builder.mul(first, out_step)), out_step, out_panel),
            )
        return _context.get_dummy_value()

    return signature, generate


def _tile(
    builder: Any, shape: list[int], dot: int, weight_rows: list[Any], ahead: Any, groups: Any, tokens: Any, out: Any
) -> None:
    rows, vectors, lanes = shape
    ints, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    token_vectors = vectors_of(builder, tokens[0], tokens[1], shape)
    scale_vectors = vectors_of(builder, tokens[2], integer(LANES), shape)
    tails = [offset(builder, row, groups) for row in weight_rows]
    following = offset(builder, weight_rows[0], ahead)

    def word(address: Any) -> Any:
        return broadcast(builder, load(builder, address, I32), ints)

    def visit(index: Any, sums: list[Any]) -> list[Any]:
        prefetch(builder, offset(builder, following, builder.mul(index, integer(rows))))
        at = builder.mul(index, integer(LANES))
        xs = [_token_operand(builder, load(builder, offset(builder, v, at), ints), dot) for v in token_vectors]
        found = []
        for r in range(rows):
            w = _weight_operand(builder, word(offset(builder, weight_rows[r], index)), dot)
            found += [_dot(builder, sums[r * vectors + v], xs[v], w, dot) for v in range(vectors)]
        return found

    starts = [word(offset(builder, tail, integer(1))) for tail in tails for _ in range(vectors)]
    sums = loop(builder, groups, starts, visit)
    for r in range(rows):
        scale = broadcast(builder, load(builder, tails[r], F32), floats)
        row_out = offset(builder, out[0], builder.mul(out[1], integer(r)))
        for v, place in enumerate(vectors_of(builder, row_out, out[2], shape)):
            value = builder.fmul(builder.sitofp(sums[r * vectors + v], floats), scale)
            store(builder, builder.fmul(value, load(builder, scale_vectors[v], floats)), place)


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
    """A panel [feature, lane] of floats as bytes [feature / 4, lane, 4] and a scale for each lane.

    A token's scale follows from its own largest value alone. What is not finite makes its scale so.
    """
    floats, ints = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, features, bytes_out, scale_out = args
        lanes, last = integer(LANES), builder.sub(features, integer(1))

        def value(feature: Any, kind: Any) -> Any:
            return load(builder, offset(builder, x, builder.mul(feature, lanes)), kind)

        def larger(feature: Any, state: list[Any]) -> list[Any]:
            # As integers: NaN is then larger than infinity, and that than any number.
            bits = builder.and_(value(feature, ints), splat(0x7FFFFFFF, ints))
            return [builder.select(builder.icmp_signed(">", bits, state[0]), bits, state[0])]

        smallest = builder.bitcast(splat(SMALLEST, floats), ints)
        (bits,) = loop(builder, features, [smallest], larger)
        largest, levels = builder.bitcast(bits, floats), splat(127.0, floats)
        store(builder, builder.fdiv(largest, levels), scale_out)
        inverse = builder.fdiv(levels, largest)
        # Added to a number of at most 127, this leaves it, rounded to even and 128 larger, in the lowest byte.
        magic = splat(3.0 * 2**22 + 128, floats)

        def pack(group: Any, _state: list[Any]) -> list[Any]:
            word = splat(0, ints)
            for place in range(4):
                feature = builder.add(builder.mul(group, integer(4)), integer(place))
                feature = builder.select(builder.icmp_signed("<", feature, last), feature, last)  # weights there are 0
                rounded = builder.fadd(builder.fmul(value(feature, floats), inverse), magic)
                byte = builder.and_(builder.bitcast(rounded, ints), splat(0xFF, ints))
                word = builder.or_(word, builder.shl(byte, splat(8 * place, ints)))
            store(builder, word, offset(builder, bytes_out, builder.mul(group, lanes)))
            return []

        loop(builder, builder.lshr(builder.add(features, integer(3)), integer(2)), [], pack)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
