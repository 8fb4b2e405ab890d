"""Linear layers over panels of tokens: which block shape for how many tokens, and how threads share the outputs.

Tokens lie in panels of `LANES`: [panel, feature, lane]. All matrices and token arrays are addresses here, sizes count
floats.
"""

import numpy as np

from inference.kernels.compiling import exact, fast
from inference.kernels.cpu_math import exp, floats
from inference.kernels.cpu_team import take
from inference.kernels.cpu_tile import LANES, WIDE, product

U = np.uint64  # an unsigned index needs no test for a negative one, which would keep a loop from vectorising
_CHUNK = 24  # outputs taken at once are a multiple: every block height divides it
_CHUNK_BYTES = 1 << 19  # weights of a chunk stay in the second-level cache while all tokens pass
_LONG_ROW = 1 << 14  # bytes; a block of longer ones, fetched ahead, would push the present one out of the cache


@exact
def chunk_rows(num_rows, num_features, threads):  # type: ignore[no-untyped-def]
    fair = num_rows // (threads * 8)
    fitting = _CHUNK_BYTES // (4 * num_features)
    return max(_CHUNK, min(fair, fitting) // _CHUNK * _CHUNK)


@exact
def linear(  # type: ignore[no-untyped-def]
    signals, piece, threads, weight, bias, num_rows, num_features, x, x_panel, out, out_step, out_panel, tokens
):
    """out = weight x + bias. `bias` may be 0; steps lead from a feature to the next, panels to the next panel."""
    size = chunk_rows(num_rows, num_features, threads)
    while True:
        first = take(signals, piece, size)
        if first >= num_rows:
            return
        rows = min(size, num_rows - first)
        start = out + 4 * first * out_step
        _rows(weight + 4 * first * num_features, num_features, x, x_panel, start, out_step, out_panel, rows, tokens)
        if bias != 0:
            add_bias(floats(bias + 4 * first, rows), start, out_step, out_panel, tokens)


@exact
def gated_linear(  # type: ignore[no-untyped-def]
    signals, piece, threads, weight, bias, size, num_features, x, x_panel, out, panel, tokens
):
    """out[:size] = silu(gate x) * (up x); `weight` holds gate above up, and so does `out` for the time being."""
    taken, lanes = chunk_rows(size, num_features, threads), np.int64(LANES)
    while True:
        first = take(signals, piece, taken)
        if first >= size:
            return
        rows = min(taken, size - first)
        for row in (first, size + first):
            start = out + 4 * row * LANES
            _rows(weight + 4 * row * num_features, num_features, x, x_panel, start, lanes, panel, rows, tokens)
            if bias != 0:
                add_bias(floats(bias + 4 * row, rows), start, lanes, panel, tokens)
        for at in range(0, tokens, LANES):
            start = out + 4 * (at // LANES * panel + first * LANES)
            gate(floats(start, rows * LANES), floats(start + 4 * size * LANES, rows * LANES))


@fast
def gate(gate, up):  # type: ignore[no-untyped-def]
    for i in range(len(gate)):
        x = gate[U(i)]
        gate[U(i)] = x / (np.float32(1) + exp(-x)) * up[U(i)]


@exact
def add_bias(bias, out, out_step, out_panel, tokens):  # type: ignore[no-untyped-def]
    for at in range(0, tokens, LANES):
        for n in range(len(bias)):
            lanes = floats(out + 4 * (at // LANES * out_panel + n * out_step), LANES)
            for lane in range(LANES):
                lanes[lane] += bias[n]


@exact
def _rows(w, count, x, x_panel, out, out_step, out_panel, rows, tokens):  # type: ignore[no-untyped-def]
    """Blocks as high and wide as the registers allow, 16 (AVX2) or 32 (AVX-512); tokens are computed by eights."""
    left = (tokens + 7) // 8
    ahead = 1 if 4 * count <= _LONG_ROW else 0
    while left > 0:
        if WIDE == 16 and left >= 8:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 6, ahead, 6, 4, 16)
            done, taken = rows // 6 * 6, 8
        elif WIDE == 16 and left == 6:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 8, ahead, 8, 3, 16)
            done, taken = rows // 8 * 8, 6
        elif WIDE == 16 and left == 5:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 4, ahead, 4, 5, 8)
            done, taken = rows // 4 * 4, 5
        elif WIDE == 16 and left >= 4:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, ahead, 12, 2, 16)
            done, taken = rows // 12 * 12, 4
        elif WIDE == 16 and left == 3:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 8, ahead, 8, 3, 8)
            done, taken = rows // 8 * 8, 3
        elif WIDE == 16 and left == 2:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, ahead, 12, 1, 16)
            done, taken = rows // 12 * 12, 2
        elif WIDE == 8 and left == 3:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 4, ahead, 4, 3, 8)
            done, taken = rows // 4 * 4, 3
        elif WIDE == 8 and left >= 2:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 6, ahead, 6, 2, 8)
            done, taken = rows // 6 * 6, 2
        else:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, ahead, 12, 1, 8)
            done, taken = rows // 12 * 12, 1
        if done < rows:
            tail, to = w + 4 * done * count, out + 4 * done * out_step
            for panel in range((taken + 1) // 2):
                at, onto = x + 4 * panel * x_panel, to + 4 * panel * out_panel
                product(tail, count, count, at, LANES, x_panel, onto, out_step, out_panel, rows - done, 0, 1, 2, 8)
        left -= taken
        x, out = x + 4 * (taken // 2) * x_panel, out + 4 * (taken // 2) * out_panel
        ahead = 0  # what follows finds the weights in the cache
