"""Linear layers with int8 weights over panels of tokens: `inference.kernels.cpu_linear` with the other product.

Layouts are those of `inference.kernels.cpu_int8_tile`.
"""

import numpy as np

from inference.kernels.compiling import exact
from inference.kernels.cpu_int8_tile import DOT, ROW_TAIL, WIDE, product, quantize
from inference.kernels.cpu_linear import add_bias, chunk_rows, gate
from inference.kernels.cpu_math import floats
from inference.kernels.cpu_team import take
from inference.kernels.cpu_tile import LANES

_LONG_ROW = 1 << 14  # bytes, as in `inference.kernels.cpu_linear`


@exact
def quantize_panels(thread, threads, x, x_panel, num_features, quantized, scales, tokens):  # type: ignore[no-untyped-def]
    """Every `threads`-th panel of 16 tokens, from floats at `x` to bytes at `quantized`."""
    groups = (num_features + 3) // 4
    for panel in range(thread, (tokens + LANES - 1) // LANES, threads):
        quantize(
            x + 4 * panel * x_panel,
            num_features,
            quantized + 4 * panel * 2 * groups * LANES,
            scales + 4 * panel * LANES,
        )


@exact
def int8_linear(  # type: ignore[no-untyped-def]
    signals, piece, threads, weight, bias, num_rows, num_features, x, scales, out, out_step, out_panel, tokens
):
    """out = weight x + bias, in float32. `bias` may be 0."""
    words = (num_features + 3) // 4 + ROW_TAIL
    size = chunk_rows(num_rows, words, threads)
    while True:
        first = take(signals, piece, size)
        if first >= num_rows:
            return
        rows = min(size, num_rows - first)
        start = out + 4 * first * out_step
        _rows(weight + 4 * first * words, words - ROW_TAIL, x, scales, start, out_step, out_panel, rows, tokens)
        if bias != 0:
            add_bias(floats(bias + 4 * first, rows), start, out_step, out_panel, tokens)


@exact
def int8_gated_linear(  # type: ignore[no-untyped-def]
    signals, piece, threads, weight, bias, size, num_features, x, scales, out, panel, tokens
):
    """out[:size] = silu(gate x) * (up x); `weight` holds gate above up, and so does `out` for the time being."""
    words = (num_features + 3) // 4 + ROW_TAIL
    taken, lanes = chunk_rows(size, words, threads), np.int64(LANES)
    while True:
        first = take(signals, piece, taken)
        if first >= size:
            return
        rows = min(taken, size - first)
        for row in (first, size + first):
            start = out + 4 * row * LANES
            _rows(weight + 4 * row * words, words - ROW_TAIL, x, scales, start, lanes, panel, rows, tokens)
            if bias != 0:
                add_bias(floats(bias + 4 * row, rows), start, lanes, panel, tokens)
        for at in range(0, tokens, LANES):
            start = out + 4 * (at // LANES * panel + first * LANES)
            gate(floats(start, rows * LANES), floats(start + 4 * size * LANES, rows * LANES))


@exact
def _rows(w, groups, x, scales, out, out_step, out_panel, rows, tokens):  # type: ignore[no-untyped-def]
    """Blocks as high and wide as the registers allow, 16 (AVX2) or 32 (AVX-512)."""
    left, planes, words = (tokens + LANES - 1) // LANES, 2 * groups * LANES, groups + ROW_TAIL
    ahead = 1 if 4 * words <= _LONG_ROW else 0
    while left > 0:
        taken = 1
        if WIDE == 16 and left >= 2:
            product(w, groups, x, scales, out, out_step, out_panel, rows // 6, ahead, 6, 2, 16, DOT)
            done, taken = rows // 6 * 6, 2
        elif WIDE == 16:
            product(w, groups, x, scales, out, out_step, out_panel, rows // 12, ahead, 12, 1, 16, DOT)
            done = rows // 12 * 12
        else:
            for lane in range(0, LANES, 8):
                at, to, scale = x + 4 * lane, out + 4 * lane, scales + 4 * lane
                product(w, groups, at, scale, to, out_step, out_panel, rows // 4, ahead, 4, 1, 8, DOT)
            done = rows // 4 * 4
        if done < rows:
            tail, rest = w + 4 * done * words, out + 4 * done * out_step
            for panel in range(taken):
                for lane in range(0, LANES, 8):
                    at, scale = x + 4 * (panel * planes + lane), scales + 4 * (panel * LANES + lane)
                    to = rest + 4 * (panel * out_panel + lane)
                    product(tail, groups, at, scale, to, out_step, out_panel, rows - done, 0, 1, 1, 8, DOT)
        left -= taken
        x, out, scales = x + 4 * taken * planes, out + 4 * taken * out_panel, scales + 4 * taken * LANES
        ahead = 0  # what follows finds the weights in the cache
