"""Products of int8 weight rows with 16-bit tokens, in a block of registers like that of `inference.kernels.cpu_tile`.

Tokens lie as `inference.kernels.cpu_dot` says, both bytes unsigned, and every weight row ends with what takes the 128
in each of them out again:

    weights  [row, feature / 4, 4] int8, then the row's float32 scale, then -128 times the sum of its weights, int32

The sums are exact integers: a token's result is the same alone and in any batch, whatever the block.

Twin: `inference.quantization.int8`.
"""

from typing import Any

from llvmlite import ir

from inference.kernels.cpu_dot import multiply_add, signed, unsigned
from inference.kernels.cpu_ir import F32, I32, broadcast, integer, load, loop, offset, prefetch, splat, store
from inference.kernels.cpu_tile import LANES


def tile(
    builder: Any, shape: list[int], dot: int, weight_rows: list[Any], following: Any, quads: Any, tokens: Any, out: Any
) -> None:
    """`tokens`: addresses of bytes and of scales; `out`: address, and steps to the next output and panel."""
    rows, panels, lanes = shape
    ints, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    plane = builder.mul(quads, integer(LANES))
    planes = [offset(builder, tokens[0], builder.mul(plane, integer(p))) for p in range(2 * panels)]
    tails = [offset(builder, row, quads) for row in weight_rows]

    def word(address: Any) -> Any:
        return broadcast(builder, load(builder, address, I32), ints)

    def visit(index: Any, sums: list[Any]) -> list[Any]:
        prefetch(builder, offset(builder, following, builder.mul(index, integer(rows))))
        at = builder.mul(index, integer(LANES))
        xs = [unsigned(builder, load(builder, offset(builder, start, at), ints), dot) for start in planes]
        found = []
        for r in range(rows):
            w = signed(builder, word(offset(builder, weight_rows[r], index)), dot)
            found += [multiply_add(builder, sums[r * len(xs) + v], x, w, dot) for v, x in enumerate(xs)]
        return found

    corrections = [word(offset(builder, tail, integer(1))) for tail in tails]
    starts = [correction for correction in corrections for _ in planes]
    sums = [builder.sitofp(total, floats) for total in loop(builder, quads, starts, visit)]
    for r in range(rows):
        scale = broadcast(builder, load(builder, tails[r], F32), floats)
        for p in range(panels):
            high, low = sums[2 * (r * panels + p) : 2 * (r * panels + p) + 2]
            value = builder.fadd(builder.fmul(high, splat(256.0, floats)), low)
            token_scale = load(builder, offset(builder, tokens[1], integer(p * LANES)), floats)
            value = builder.fmul(builder.fmul(value, scale), token_scale)
            at = builder.add(builder.mul(out[1], integer(r)), builder.mul(out[2], integer(p)))
            store(builder, value, offset(builder, out[0], at))
