"""Linear layers over panels of tokens: how threads share the outputs, whatever the rows of weights are made of.

`bits` 0: floats, `inference.kernels.cpu_float_rows`; 8 or 4: `inference.kernels.cpu_quantized_rows`, whose tokens are
bytes at `x` with `scales` and `sums` of their own, which nobody looks at else. All matrices and token arrays are
addresses here, sizes count words of 4 bytes.
"""

import numpy as np

from inference.kernels.compiling import exact
from inference.kernels.cpu_float_rows import float_rows
from inference.kernels.cpu_math import exp, floats
from inference.kernels.cpu_quantized_rows import quantized_rows, row_words
from inference.kernels.cpu_team import take
from inference.kernels.cpu_tile import LANES

U = np.uint64  # an unsigned index needs no test for a negative one, which would keep a loop from vectorising
_CHUNK = 24  # outputs taken at once are a multiple: every block height divides it
_CHUNK_BYTES = 1 << 19  # weights of a chunk stay in the second-level cache while all tokens pass


@exact
def _chunk_rows(num_rows, words, threads):  # type: ignore[no-untyped-def]
    fair = num_rows // (threads * 8)
    fitting = _CHUNK_BYTES // (4 * words)
    return max(_CHUNK, min(fair, fitting) // _CHUNK * _CHUNK)


@exact
def share_start(num_rows, share, threads):  # type: ignore[no-untyped-def]
    """Where the rows begin that a thread takes before it helps others: in order, so that it can fetch ahead."""
    chunks = (num_rows + _CHUNK - 1) // _CHUNK
    return min(num_rows, share * chunks // threads * _CHUNK)


@exact
def _take_rows(thread, threads, signals, piece, num_rows, size):  # type: ignore[no-untyped-def]
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
    thread, threads, signals, piece, bits, weight, bias, num_rows, num_features, x, x_panel, scales, sums, out,
    out_step, out_panel, tokens, beyond,
):  # fmt: skip
    """out = weight x + bias. `bias` may be 0; steps lead from a feature to the next, panels to the next panel.

    `beyond`: the weights this thread will read after these, or 0.
    """
    words = row_words(bits, num_features)
    size = _chunk_rows(num_rows, words, threads)
    while True:
        first, end, stop = _take_rows(thread, threads, signals, piece, num_rows, size)
        if first == end:
            return
        after = weight + 4 * end * words if end < stop else beyond
        _rows(
            bits, weight, bias, words, num_features, first, end, x, x_panel, scales, sums, out, out_step, out_panel,
            tokens, after,
        )  # fmt: skip


@exact
def gated_linear(  # type: ignore[no-untyped-def]
    thread, threads, signals, piece, bits, weight, bias, size, num_features, x, x_panel, scales, sums, out, panel,
    tokens, beyond,
):  # fmt: skip
    """out[:size] = silu(gate x) * (up x); `weight` holds gate above up, and so does `out` for the time being."""
    words, lanes = row_words(bits, num_features), np.int64(LANES)
    taken = _chunk_rows(size, words, threads)
    while True:
        first, end, stop = _take_rows(thread, threads, signals, piece, size, taken)
        if first == end:
            return
        after = weight + 4 * end * words if end < stop else beyond
        for skip, following in ((np.int64(0), weight + 4 * (size + first) * words), (size, after)):
            _rows(
                bits, weight, bias, words, num_features, skip + first, skip + end, x, x_panel, scales, sums, out, lanes,
                panel, tokens, following,
            )  # fmt: skip
        for at in range(0, tokens, LANES):
            start, count = out + 4 * (at // LANES * panel + first * LANES), (end - first) * LANES
            gate(floats(start, count), floats(start + 4 * size * LANES, count))


@exact
def _rows(  # type: ignore[no-untyped-def]
    bits, weight, bias, words, num_features, first, end, x, x_panel, scales, sums, out, out_step, out_panel, tokens,
    after,
):  # fmt: skip
    """Of `linear`, the outputs from `first` on."""
    w, to, rows = weight + 4 * first * words, out + 4 * first * out_step, end - first
    if bits:
        quantized_rows(bits, w, words, num_features, x, scales, sums, to, out_step, out_panel, rows, tokens, after)
    else:
        float_rows(w, num_features, x, x_panel, to, out_step, out_panel, rows, tokens, after)
    if bias != 0:
        add_bias(floats(bias + 4 * first, rows), to, out_step, out_panel, tokens)


@exact
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
