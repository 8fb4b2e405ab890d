"""Products of int4 weight rows with 16-bit tokens, like those of `inference.kernels.cpu_int8_tile`.

Tokens lie as `inference.kernels.cpu_dot` says, in signed bytes, and beside them their sums over each group of inputs:

    weights  [row, group, feature / 8, 4] two halves a byte, then for each group minimum and scale, bfloat16
    sums     [panel, group, lane] float32

Within a group sums are exact integers; over the groups floats are added up in the order of the groups, in `out`, for
registers hold the integers. A token's result is the same alone and in any batch.

Twin: `inference.quantization.int4`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.kernels.cpu_dot import DOT, WIDE, multiply_add, signed, unsigned
from inference.kernels.cpu_ir import F32, I32, broadcast, integer, load, loop, offset, prefetch, splat, store
from inference.kernels.cpu_tile import LANES

GROUP = 32  # inputs, as in `inference.quantization.int4`
WORDS, QUADS = GROUP // 8, GROUP // 4  # of a group: words of weights, bytes of a token


def tile(
    builder: Any, shape: list[int], dot: int, weight_rows: list[Any], following: Any, groups: Any, tokens: Any, out: Any
) -> None:
    """`tokens`: addresses of bytes, of scales and of sums; `out`: address, and steps to the next output and panel."""
    rows, panels, lanes = shape
    floats = ir.VectorType(F32, lanes)
    plane = builder.mul(groups, integer(QUADS * LANES))
    planes = [offset(builder, tokens[0], builder.mul(plane, integer(p))) for p in range(2 * panels)]
    tails = [offset(builder, row, builder.mul(groups, integer(WORDS))) for row in weight_rows]
    last = builder.sub(groups, integer(1))
    with cgutils.for_range(builder, groups) as group_loop:
        group = group_loop.index
        first, ends = builder.icmp_signed("==", group, integer(0)), builder.icmp_signed("==", group, last)
        products = _group_products(builder, shape, dot, weight_rows, following, group, planes)
        for r in range(rows):
            low, scale = _minimum_and_scale(builder, load(builder, offset(builder, tails[r], group), I32), floats)
            for p in range(panels):
                at = builder.mul(builder.add(group, builder.mul(groups, integer(p))), integer(LANES))
                total = load(builder, offset(builder, tokens[2], at), floats)
                value = builder.fmul(builder.sitofp(products[r * panels + p], floats), scale)
                value = builder.fadd(value, builder.fmul(total, low))
                to = offset(
                    builder, out[0], builder.add(builder.mul(out[1], integer(r)), builder.mul(out[2], integer(p)))
                )
                before = builder.select(first, splat(0.0, floats), load(builder, to, floats))
                token_scale = load(builder, offset(builder, tokens[1], integer(p * LANES)), floats)
                worth = builder.select(ends, token_scale, splat(1.0, floats))
                store(builder, builder.fmul(builder.fadd(before, value), worth), to)


def _group_products(
    builder: Any, shape: list[int], dot: int, weight_rows: list[Any], following: Any, group: Any, planes: list[Any]
) -> list[Any]:
    """int32 for each row and panel."""
    rows, panels, lanes = shape
    ints = ir.VectorType(I32, lanes)
    start, half = builder.mul(group, integer(WORDS)), splat(0x0F0F0F0F, ints)

    def visit(index: Any, sums: list[Any]) -> list[Any]:
        at = builder.add(start, index)
        prefetch(builder, offset(builder, following, builder.mul(at, integer(rows))))
        xs = [
            [
                signed(builder, load(builder, offset(builder, plane, builder.mul(quad, integer(LANES))), ints), dot)
                for plane in planes
            ]
            for quad in (builder.mul(at, integer(2)), builder.add(builder.mul(at, integer(2)), integer(1)))
        ]
        found = []
        for r in range(rows):
            w = broadcast(builder, load(builder, offset(builder, weight_rows[r], at), I32), ints)
            four = splat(4, ints)
            halves = [builder.and_(part, half) for part in (w, builder.lshr(w, four))]
            for v in range(len(planes)):
                total = sums[r * len(planes) + v]
                for part, x in zip(halves, xs, strict=True):
                    total = multiply_add(builder, total, unsigned(builder, part, dot), x[v], dot)
                found.append(total)
        return found

    sums = loop(builder, integer(WORDS), [splat(0, ints)] * (2 * rows * panels), visit)
    eight = splat(8, ints)
    return [builder.add(builder.shl(sums[i], eight), sums[i + 1]) for i in range(0, len(sums), 2)]


def _minimum_and_scale(builder: Any, word: Any, floats: Any) -> list[Any]:
    """bfloat16 is the upper half of a float."""
    sixteen, upper = ir.Constant(I32, 16), ir.Constant(I32, -(1 << 16))
    halves = (builder.shl(word, sixteen), builder.and_(word, upper))
    return [broadcast(builder, builder.bitcast(one, F32), floats) for one in halves]


@intrinsic
def group_sums(typing_context, quantized, groups, sums_out):  # type: ignore[no-untyped-def]
    """Of one panel of signed bytes, [group, lane] float32."""
    floats, ints = ir.VectorType(F32, WIDE), ir.VectorType(I32, WIDE)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        quantized, groups, sums_out = args
        plane = builder.mul(groups, integer(QUADS * LANES))
        ones = unsigned(builder, splat(0x01010101, ints), DOT)
        with cgutils.for_range(builder, groups) as group_loop:
            start = builder.mul(group_loop.index, integer(QUADS * LANES))
            for lane in range(0, LANES, WIDE):
                from_lane = offset(builder, quantized, builder.add(start, integer(lane)))

                def visit(index: Any, sums: list[Any], from_lane: Any = from_lane) -> list[Any]:
                    at = offset(builder, from_lane, builder.mul(index, integer(LANES)))
                    xs = [load(builder, at, ints), load(builder, offset(builder, at, plane), ints)]
                    return [
                        multiply_add(builder, total, ones, signed(builder, x, DOT), DOT)
                        for total, x in zip(sums, xs, strict=True)
                    ]

                high, low = loop(builder, integer(QUADS), [splat(0, ints)] * 2, visit)
                total = builder.add(builder.shl(high, splat(8, ints)), low)
                to = builder.add(builder.mul(group_loop.index, integer(LANES)), integer(lane))
                store(builder, builder.sitofp(total, floats), offset(builder, sums_out, to))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate
