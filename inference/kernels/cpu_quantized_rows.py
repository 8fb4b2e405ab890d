"""A few rows of weights in 8 or 4 bits times panels of tokens: which block shape for how many tokens.

`bits` says which, 8 or 4; layouts are those of `inference.kernels.cpu_int8_tile` and `cpu_int4_tile`, of tokens those
of `inference.kernels.cpu_dot`. Steps are in words of 4 bytes.
"""

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.kernels import cpu_int4_tile, cpu_int8_tile
from inference.kernels.compiling import exact
from inference.kernels.cpu_dot import DOT, WIDE, quantize
from inference.kernels.cpu_int4_tile import GROUP, QUADS, WORDS, group_sums
from inference.kernels.cpu_ir import integer, offset
from inference.kernels.cpu_tile import LANES, LONG_ROW


@exact
def row_words(bits, num_features):  # type: ignore[no-untyped-def]
    """Of a row of weights; `bits` 0 stands for floats."""
    if bits == 0:
        return num_features
    words = (num_features + 3) // 4 + 2 if bits == 8 else (num_features + GROUP - 1) // GROUP * (WORDS + 1)
    return (words + 3) // 4 * 4


@exact
def token_quads(bits, num_features):  # type: ignore[no-untyped-def]
    return (num_features + 3) // 4 if bits == 8 else (num_features + GROUP - 1) // GROUP * QUADS


@exact
def quantize_panels(thread, threads, bits, x, x_panel, num_features, quantized, scales, sums, tokens):  # type: ignore[no-untyped-def]
    """Every `threads`-th panel of 16 tokens, from floats at `x` to bytes at `quantized`."""
    quads = token_quads(bits, num_features)
    groups = quads // QUADS
    for panel in range(thread, (tokens + LANES - 1) // LANES, threads):
        into = quantized + 4 * panel * 2 * quads * LANES
        quantize(x + 4 * panel * x_panel, num_features, quads, int(bits == 4), into, scales + 4 * panel * LANES)
        if bits == 4:
            group_sums(into, groups, sums + 4 * panel * groups * LANES)


@exact
def quantized_rows(bits, w, words, num_features, x, scales, sums, out, out_step, out_panel, rows, tokens, after):  # type: ignore[no-untyped-def]
    """As `inference.kernels.cpu_float_rows.float_rows`: blocks as high and wide as the registers allow, 16 (AVX2) or 32
    (AVX-512)."""
    quads = token_quads(bits, num_features)
    count = quads if bits == 8 else quads // QUADS
    left, planes, groups = (tokens + LANES - 1) // LANES, 2 * quads * LANES, quads // QUADS * LANES
    none = np.int64(0)
    if 4 * words > LONG_ROW:
        after = none
    while left > 0:
        taken = 1
        if WIDE == 16 and left >= 2:
            each = rows // 6
            product(bits, w, words, count, x, scales, sums, out, out_step, out_panel, each, after, 6, 2, 16, DOT)
            done, taken = each * 6, 2
        elif WIDE == 16:
            each = rows // 12
            product(bits, w, words, count, x, scales, sums, out, out_step, out_panel, each, after, 12, 1, 16, DOT)
            done = each * 12
        else:
            each = rows // 4
            for lane in range(0, 4 * LANES, 32):
                at, to, scale, total = x + lane, out + lane, scales + lane, sums + lane
                product(bits, w, words, count, at, scale, total, to, out_step, out_panel, each, after, 4, 1, 8, DOT)
            done = each * 4
        if done < rows:
            tail, rest, each = w + 4 * done * words, out + 4 * done * out_step, rows - done
            for panel in range(taken):
                for lane in range(0, LANES, 8):
                    at, scale = x + 4 * (panel * planes + lane), scales + 4 * (panel * LANES + lane)
                    total, to = sums + 4 * (panel * groups + lane), rest + 4 * (panel * out_panel + lane)
                    product(
                        bits, tail, words, count, at, scale, total, to, out_step, out_panel, each, none, 1, 1, 8, DOT
                    )
        left -= taken
        x, out = x + 4 * taken * planes, out + 4 * taken * out_panel
        scales, sums = scales + 4 * taken * LANES, sums + 4 * taken * groups
        after = none  # what follows finds the weights in the cache


@intrinsic(prefer_literal=True)
def product(  # type: ignore[no-untyped-def]
    typing_context,
    bits,
    weights,
    row,
    count,
    tokens,
    scales,
    sums,
    out,
    out_step,
    out_panel,
    num_blocks,
    after,
    rows,
    panels,
    lanes,
    dot,
):
    """`num_blocks` blocks of `rows` outputs, in float32, for the first `lanes` tokens of each of `panels` panels.

    `row`: words from a weight row to the next; `count`: quads of a row in 8 bits, groups in 4; `after` as in
    `inference.kernels.cpu_tile.product`.
    """
    shape = [t.literal_value for t in (rows, panels, lanes)]
    kind = dot.literal_value
    signature = types.void(*[types.int64] * 12, rows, panels, lanes, dot)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits, weights, row, count, tokens, scales, sums, out, out_step, out_panel, blocks, after = args[:12]

        def run(tile: Any) -> None:
            with cgutils.for_range(builder, blocks) as row_loop:
                first = builder.mul(row_loop.index, integer(shape[0]))
                weight_rows = [
                    offset(builder, weights, builder.mul(row, builder.add(first, integer(r)))) for r in range(shape[0])
                ]
                is_last = builder.icmp_signed("==", builder.add(row_loop.index, integer(1)), blocks)
                following = offset(builder, weight_rows[0], builder.mul(row, integer(shape[0])))
                following = builder.select(is_last, after, following)
                following = builder.select(builder.icmp_signed("==", after, integer(0)), weight_rows[0], following)
                to = (offset(builder, out, builder.mul(first, out_step)), out_step, out_panel)
                tile(builder, shape, kind, weight_rows, following, count, (tokens, scales, sums), to)

        with builder.if_else(builder.icmp_signed("==", bits, integer(8))) as (eight, four):
            with eight:
                run(cpu_int8_tile.tile)
            with four:
                run(cpu_int4_tile.tile)
        return _context.get_dummy_value()

    return signature, generate
