"""Attention over the paged KV pool for a CPU: each key and value is read once for all queries that share it.

Keys lie transposed in their block ([D, S]), so that scores of neighbouring keys fill a vector and need no horizontal
sums; scores and outputs are then the same block product as the linear layers. A token's arithmetic depends on its own
context alone, not on who else is in the step or whether its prompt came in chunks.

Twin: `inference.model.attention.attend_torch`.

Suffixes: T tokens, H all heads (queries, keys, values), D head size, G queries that share a key, R rows of the block
table, W its width, P positions, F half of D, S block size.
"""

import numpy as np

from inference.kernels.compiling import exact
from inference.kernels.cpu_int8_kv import store_int8, unpack_keys, unpack_values
from inference.kernels.cpu_math import address, exp, floats
from inference.kernels.cpu_reduce import highest, sum_of, sum_of_squares
from inference.kernels.cpu_tile import LANES, WIDE, accumulate

TILE = 512  # keys whose scores are held at once
_SCORES = LANES // WIDE  # vectors of scores computed at once
U = np.uint64  # an unsigned index needs no test for a negative one, which would keep inner loops from vectorising


def scores_width(block_size: int) -> int:
    """A tile, the lanes that a last vector reaches beyond it, and two columns for the maximum and the sum so far."""
    return max(TILE, block_size) + 2 * LANES


@exact
def norm_rope_store(  # type: ignore[no-untyped-def]
    x_HD,
    num_heads,
    num_kv,
    norm_heads,
    q_norm,
    k_norm,
    eps,
    cos_F,
    sin_F,
    keys,
    values,
    block_step,
    int8,
    slot,
    block_size,
):
    """One token: normalise and rotate queries (in place) and keys, write keys and values to their slot.

    `norm_heads` is 0 for no norm, 1 for each head by itself, 2 for the whole projection; `q_norm`, `k_norm`, `keys`
    and `values` are addresses.
    """
    head_dim = x_HD.shape[1]
    half = head_dim // 2
    if norm_heads == 1:
        for h in range(num_heads + num_kv):
            _normalize(x_HD[h : h + 1], floats(q_norm if h < num_heads else k_norm, head_dim), eps)
    elif norm_heads == 2:
        _normalize(x_HD[:num_heads], floats(q_norm, num_heads * head_dim), eps)
        _normalize(x_HD[num_heads : num_heads + num_kv], floats(k_norm, num_kv * head_dim), eps)
    for h in range(num_heads + num_kv):
        x = x_HD[h]
        for d in range(half):
            low = x[U(d)]
            high = x[U(d + half)]
            x[U(d)] = low * cos_F[U(d)] - high * sin_F[U(d)]
            x[U(d + half)] = high * cos_F[U(d)] + low * sin_F[U(d)]
    block, offset = slot // block_size, slot % block_size
    size = block_size * head_dim
    if int8:
        step = block * block_step
        for k in range(num_kv):
            skip = step + k * (size + 4 * block_size)
            store_int8(x_HD[num_heads + k], keys + skip, block_size, offset, offset, block_size)
            store_int8(x_HD[num_heads + num_kv + k], values + skip, block_size, offset, offset * head_dim, 1)
        return
    for k in range(num_kv):
        key = floats(keys + block * block_step + 4 * k * size, size)
        value = floats(values + block * block_step + 4 * k * size, size)
        for d in range(head_dim):
            key[U(d * block_size + offset)] = x_HD[num_heads + k, U(d)]
            value[U(offset * head_dim + d)] = x_HD[num_heads + num_kv + k, U(d)]


@exact
def _normalize(x_HD, weight, eps):  # type: ignore[no-untyped-def]
    x = floats(address(x_HD), x_HD.size)
    scale = np.float32(1) / np.sqrt(sum_of_squares(x) / np.float32(len(x)) + np.float32(eps))
    for i in range(len(x)):
        x[U(i)] = weight[U(i)] * (x[U(i)] * scale)


@exact
def attend(  # type: ignore[no-untyped-def]
    q_HD, first_kv, num_kv, keys, values, block_step, int8, block_size, blocks_W, position, window,
    next_kv, next_blocks_W, next_position, scores_HP, keys_DS, block_X, out_HD,
):  # fmt: skip
    """The queries `q_HD` of one token over `num_kv` key heads from `first_kv` on; `keys`, `values` lie in block 0.

    Sees the positions up to its own, the last `window` of them if that is not 0. `block_step` leads from a block to
    the next in bytes. `scores_HP` (`scores_width` wide), `keys_DS` and `block_X` are scratch.

    Memory is not to rest: values come while scores are computed, and while values are summed the keys of what the
    thread does next, the token at `next_position` in `next_blocks_W` with key heads from `next_kv` on.
    """
    heads, head_dim = q_HD.shape
    group = heads // num_kv
    end = position + 1
    begin = max(0, end - window) if window > 0 else 0
    last = (end + block_size - 1) // block_size
    out_HD[:heads] = np.float32(0)
    highest_H, total_H = scores_HP[:heads, -2], scores_HP[:heads, -1]
    highest_H[:] = -np.inf
    total_H[:] = np.float32(0)
    head_bytes = block_size * (head_dim + 4) if int8 else 4 * block_size * head_dim
    next_keys = keys + next_kv * head_bytes
    keys, values = keys + first_kv * head_bytes, values + first_kv * head_bytes
    ahead = (max(0, next_position + 1 - window) if window > 0 else 0) // block_size - begin // block_size
    next_last = next_position // block_size + 1
    scale = np.float32(1.0 / np.sqrt(head_dim))
    tile = max(1, TILE // block_size)
    for start in range(begin // block_size, last, tile):
        stop = min(start + tile, last)
        for b in range(start, stop):
            # Blocks lie anywhere, so nothing but this foresees what comes next.
            key, value = keys + block_step * blocks_W[b], values + block_step * blocks_W[b]
            following = keys + block_step * blocks_W[min(b + 1, last - 1)]
            at = (b - start) * block_size
            if int8:
                for k in range(num_kv):
                    unpack_keys(key + k * head_bytes, block_size, head_dim, block_X)
                    one, q_GD = address(block_X), q_HD[k * group : (k + 1) * group]
                    _score_block(q_GD, one, one, one, np.int64(1), block_size, scores_HP[k * group :], at, keys_DS)
            else:
                _score_block(q_HD, key, following, value, num_kv, block_size, scores_HP, at, keys_DS)
        origin = start * block_size
        low, high = max(begin, origin) - origin, min(end, stop * block_size) - origin
        for h in range(heads):
            _weigh(scores_HP[h, low:high], scale, highest_H, total_H, h, out_HD)
        for b in range(start, stop):
            low = max(b * block_size, begin)
            count = min((b + 1) * block_size, end) - low
            base, skip = values + block_step * blocks_W[b], low - b * block_size
            wanted = base if int8 or b + ahead >= next_last else next_keys + block_step * next_blocks_W[b + ahead]
            for k in range(num_kv):
                value = base + k * head_bytes + 4 * skip * head_dim
                if int8:
                    unpack_values(base + k * head_bytes, block_size, head_dim, skip, count, block_X)
                    value = address(block_X)
                w = address(scores_HP[k * group :, low - origin :])
                out = address(out_HD[k * group :])
                _add_values(w, scores_HP.shape[1], count, value, head_dim, out, wanted + k * head_bytes, group)
    for h in range(heads):
        inverse = np.float32(1) / total_H[h]
        for d in range(head_dim):
            out_HD[h, U(d)] *= inverse


@exact
def _score_block(q_HD, keys, following, values, num_kv, block_size, scores_HP, at, keys_DS):  # type: ignore[no-untyped-def]
    """Scores of a block's keys, while its values and the keys of the `following` block are fetched."""
    heads, head_dim = q_HD.shape
    group, width = heads // num_kv, scores_HP.shape[1]
    for k in range(num_kv):
        q, out = address(q_HD[k * group :]), address(scores_HP[k * group :, at:])
        skip = 4 * k * block_size * head_dim
        key = keys + skip
        whole = block_size // LANES * LANES
        for s in range(0, whole, LANES):
            wanted = (following + skip + 4 * s * head_dim, values + skip + 4 * s * head_dim)
            _products(q, head_dim, head_dim, key + 4 * s, block_size, out + 4 * s, width, wanted, group)
        if whole < block_size:
            rest = floats(key, block_size * head_dim)
            for d in range(head_dim):
                for s in range(whole, block_size):
                    keys_DS[d, s - whole] = rest[d * block_size + s]
            _products(
                q, head_dim, head_dim, address(keys_DS), np.int64(LANES), out + 4 * whole, width, (key, key), group
            )


@exact
def _weigh(x, scale, highest_H, total_H, h, out_HD):  # type: ignore[no-untyped-def]
    """Scores become exp(scale * (score - highest so far)); what was summed before is brought to the same scale."""
    before = highest_H[h]
    top = max(before, highest(x))
    for i in range(len(x)):
        x[U(i)] = exp((x[U(i)] - top) * scale)
    mass = sum_of(x)
    if total_H[h] > 0:
        factor = exp((before - top) * scale)
        mass += total_H[h] * factor
        for d in range(out_HD.shape[1]):
            out_HD[h, U(d)] *= factor
    highest_H[h] = top
    total_H[h] = mass


@exact
def _products(w, w_step, count, x, x_step, out, out_step, wanted, rows):  # type: ignore[no-untyped-def]
    while rows >= 4:
        accumulate(w, w_step, count, x, x_step, out, out_step, wanted, 4, _SCORES, WIDE, 0)
        w, out, rows = w + 16 * w_step, out + 16 * out_step, rows - 4
    if rows == 3:
        accumulate(w, w_step, count, x, x_step, out, out_step, wanted, 3, _SCORES, WIDE, 0)
    elif rows == 2:
        accumulate(w, w_step, count, x, x_step, out, out_step, wanted, 2, _SCORES, WIDE, 0)
    elif rows == 1:
        accumulate(w, w_step, count, x, x_step, out, out_step, wanted, 1, _SCORES, WIDE, 0)


@exact
def _add_values(w, w_step, count, x, head_dim, out, wanted, rows):  # type: ignore[no-untyped-def]
    """out[rows, D] += w[rows, count] x[count, D], in vectors of 4 registers, then of 8 floats.

    Meanwhile as many bytes are fetched from `wanted` on.
    """
    while rows > 0:
        taken = min(rows, 3)
        at = 0
        while at + 4 * WIDE <= head_dim:
            _value_block(w, w_step, count, x + 4 * at, head_dim, out + 4 * at, wanted + 4 * at * count, taken)
            at += 4 * WIDE
        while at < head_dim:
            for r in range(taken):
                accumulate(
                    w + 4 * r * w_step,
                    w_step,
                    count,
                    x + 4 * at,
                    head_dim,
                    out + 4 * (r * head_dim + at),
                    0,
                    (),
                    1,
                    1,
                    8,
                    1,
                )
            at += 8
        w, out, rows = w + 4 * taken * w_step, out + 4 * taken * head_dim, rows - taken


@exact
def _value_block(w, w_step, count, x, x_step, out, wanted, rows):  # type: ignore[no-untyped-def]
    step = 64 * count  # a cache line a key, from each of four addresses; narrow vectors need but two of them
    upper = wanted + 2 * step * (WIDE // 16)
    lines = (wanted, wanted + step, upper, upper + step)
    if rows == 3:
        accumulate(w, w_step, count, x, x_step, out, x_step, lines, 3, 4, WIDE, 1)
    elif rows == 2:
        accumulate(w, w_step, count, x, x_step, out, x_step, lines, 2, 4, WIDE, 1)
    else:
        accumulate(w, w_step, count, x, x_step, out, x_step, lines, 1, 4, WIDE, 1)
