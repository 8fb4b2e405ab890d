"""Linear layers over panels of tokens: which block shape for how many tokens, and how threads share the outputs.

Tokens lie in panels of `LANES`: [panel, feature, lane]. All matrices and token arrays are addresses here, sizes count
floats.
"""

import numpy as np

from inference.kernels.compiling import exact, fast
from inference.kernels.cpu_math import exp, floats
from inference.kernels.cpu_team import take
from inference.kernels.cpu_tile import FULL_RATE, LANES, WIDE, product

U = np.uint64  # an unsigned index needs no test for a negative one, which would keep a loop from vectorising
_CHUNK = 24  # outputs taken at once are a multiple: every block height divides it
_CHUNK_BYTES = 1 << 19  # weights of a chunk stay in the second-level cache while all tokens pass
LONG_ROW = 1 << 14  # bytes; a block of longer ones, fetched ahead, would push the present one out of the cache


@exact
def chunk_rows(num_rows, num_features, threads):  # type: ignore[no-untyped-def]
    fair = num_rows // (threads * 8)
    fitting = _CHUNK_BYTES // (4 * num_features)
    return max(_CHUNK, min(fair, fitting) // _CHUNK * _CHUNK)


@exact
def share_start(num_rows, share, threads):  # type: ignore[no-untyped-def]
    """Where the rows begin that a thread takes before it helps others: in order, so that it can fetch ahead."""
    chunks = (num_rows + _CHUNK - 1) // _CHUNK
    return min(num_rows, share * chunks // threads * _CHUNK)


@exact
def take_rows(thread, threads, signals, piece, num_rows, size):  # type: ignore[no-untyped-def]
    """(first, end, end of the share) of the next rows: of a thread's own share, then of others'; all equal: none."""
    for turn in range(threads):
        share = (thread + turn) % threads
        stop = share_start(num_rows, share + 1, threads)
        first = share_start(num_rows, share, threads) + take(signals, piece + share, size)
        if first < stop:
            return first, min(first + size, stop), stop
    return num_rows, num_rows, num_rows


@exact
def linear(  # type: ignore[no-untyped-def]
    thread, threads, signals, piece, weight, bias, num_rows, num_features, x, x_panel, out, out_step, out_panel, tokens,
    beyond,
):  # fmt: skip
    """out = weight x + bias. `bias` may be 0; steps lead from a feature to the next, panels to the next panel.

    `beyond`: the weights this thread will read after these, or 0.
    """
    size = chunk_rows(num_rows, num_features, threads)
    while True:
        first, end, stop = take_rows(thread, threads, signals, piece, num_rows, size)
        if first == end:
            return
        rows, w, to = end - first, weight + 4 * first * num_features, out + 4 * first * out_step
        after = w + 4 * rows * num_features if end < stop else beyond
        _rows(w, num_features, x, x_panel, to, out_step, out_panel, rows, tokens, after)
        if bias != 0:
            add_bias(floats(bias + 4 * first, rows), to, out_step, out_panel, tokens)


@exact
def gated_linear(  # type: ignore[no-untyped-def]
    thread, threads, signals, piece, weight, bias, size, num_features, x, x_panel, out, panel, tokens, beyond
):
    """out[:size] = silu(gate x) * (up x); `weight` holds gate above up, and so does `out` for the time being."""
    taken, lanes = chunk_rows(size, num_features, threads), np.int64(LANES)
    up = 4 * size * num_features
    while True:
        first, end, stop = take_rows(thread, threads, signals, piece, size, taken)
        if first == end:
            return
        rows, w, to = end - first, weight + 4 * first * num_features, out + 4 * first * LANES
        after = w + 4 * rows * num_features if end < stop else beyond
        _rows(w, num_features, x, x_panel, to, lanes, panel, rows, tokens, w + up)
        _rows(w + up, num_features, x, x_panel, to + 4 * size * LANES, lanes, panel, rows, tokens, after)
        if bias != 0:
            add_bias(floats(bias + 4 * first, rows), to, lanes, panel, tokens)
            add_bias(floats(bias + 4 * (size + first), rows), to + 4 * size * LANES, lanes, panel, tokens)
        for at in range(0, tokens, LANES):
            part = to + 4 * (at // LANES * panel)
            gate(floats(part, rows * LANES), floats(part + 4 * size * LANES, rows * LANES))


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
def _rows(w, count, x, x_panel, out, out_step, out_panel, rows, tokens, after):  # type: ignore[no-untyped-def]
    """Blocks as high and wide as the registers allow, 16 (AVX2) or 32 (AVX-512); tokens are computed by eights.

    At full rate what fills up a vector costs less than half vectors, and 64 tokens would not fit the first-level cache,
    which then is what products wait for.
    """
    left = (tokens + 7) // 8
    if FULL_RATE and left > 2:
        left += left % 2
    if 4 * count > LONG_ROW:
        after = np.int64(0)
    while left > 0:
        if WIDE == 16 and left >= 8 and not FULL_RATE:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 6, after, 6, 4, 16)
            done, taken = rows // 6 * 6, 8
        elif WIDE == 16 and left == 6:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 8, after, 8, 3, 16)
            done, taken = rows // 8 * 8, 6
        elif WIDE == 16 and left == 5:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 4, after, 4, 5, 8)
            done, taken = rows // 4 * 4, 5
        elif WIDE == 16 and left >= 4:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, after, 12, 2, 16)
            done, taken = rows // 12 * 12, 4
        elif WIDE == 16 and left == 3:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 8, after, 8, 3, 8)
            done, taken = rows // 8 * 8, 3
        elif WIDE == 16 and left == 2:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, after, 12, 1, 16)
            done, taken = rows // 12 * 12, 2
        elif WIDE == 8 and left == 3:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 4, after, 4, 3, 8)
            done, taken = rows // 4 * 4, 3
        elif WIDE == 8 and left >= 2:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 6, after, 6, 2, 8)
            done, taken = rows // 6 * 6, 2
        else:
            product(w, count, count, x, LANES, x_panel, out, out_step, out_panel, rows // 12, after, 12, 1, 8)
            done, taken = rows // 12 * 12, 1
        if done < rows:
            tail, to = w + 4 * done * count, out + 4 * done * out_step
            for panel in range((taken + 1) // 2):
                at, onto = x + 4 * panel * x_panel, to + 4 * panel * out_panel
                product(
                    tail, count, count, at, LANES, x_panel, onto, out_step, out_panel, rows - done, np.int64(0), 1, 2, 8
                )
        left -= taken
        x, out = x + 4 * (taken // 2) * x_panel, out + 4 * (taken // 2) * out_panel
        after = np.int64(0)  # what follows finds the weights in the cache
