"""Attention over the paged KV pool, compiled for one CPU core: no gather, no padding, only live keys are touched.

Twin: `inference.model.attention` in torch. Kernels are built for one head size, so that inner loops have constant
length and vectorise; a constant handed to a callee that is inlined stays one. (A callee that is itself a closure would
keep its kernel out of numba's cache on disk.) Floating-point flags allow reordering but keep NaN meaningful.

Suffixes: T tokens, H all heads (queries, keys, values), D head size, B blocks, K key heads, S block size.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

_FLAGS = {"reassoc", "contract", "nsz", "arcp"}
U = np.uint64  # an unsigned index needs no test for a negative one, which would keep inner loops from vectorising


@cache
def norm_rope_store(head_dim: int) -> Callable[..., Any]:
    """Normalise and rotate queries (in place) and keys, and write keys and values to their slots."""
    half = head_dim // 2

    @numba.njit(cache=True, nogil=True, fastmath=_FLAGS)
    def kernel(  # type: ignore[no-untyped-def]
        qkv_THD,
        num_heads,
        q_norm,
        k_norm,
        norm_heads,
        eps,
        cos_PF,
        sin_PF,
        positions_T,
        slots_T,
        keys_BKSD,
        values_BKSD,
    ):
        num_kv = keys_BKSD.shape[1]
        block_size = keys_BKSD.shape[2]
        for t in range(qkv_THD.shape[0]):
            position = positions_T[t]
            block = slots_T[t] // block_size
            offset = slots_T[t] % block_size
            if norm_heads == 1:  # each head by itself
                for h in range(num_heads + num_kv):
                    _normalize(qkv_THD[t, h : h + 1], q_norm if h < num_heads else k_norm, eps)
            elif norm_heads == 2:  # the whole projection
                _normalize(qkv_THD[t, :num_heads], q_norm, eps)
                _normalize(qkv_THD[t, num_heads : num_heads + num_kv], k_norm, eps)
            for h in range(num_heads + num_kv):
                x = qkv_THD[t, h]
                y = x if h < num_heads else keys_BKSD[block, h - num_heads, offset]
                for d in range(half):
                    low = x[U(d)]
                    high = x[U(d + half)]
                    c = cos_PF[position, U(d)]
                    s = sin_PF[position, U(d)]
                    y[U(d)] = low * c - high * s
                    y[U(d + half)] = high * c + low * s
            for h in range(num_kv):
                x = qkv_THD[t, num_heads + num_kv + h]
                y = values_BKSD[block, h, offset]
                for d in range(head_dim):
                    y[U(d)] = x[U(d)]

    return kernel


@numba.njit(cache=True, nogil=True, fastmath=_FLAGS)
def _normalize(x_HD, weight, eps):  # type: ignore[no-untyped-def]
    heads, size = x_HD.shape
    total = np.float32(0)
    for h in range(heads):
        for d in range(size):
            total += x_HD[h, d] * x_HD[h, d]
    scale = np.float32(1) / np.sqrt(total / np.float32(heads * size) + np.float32(eps))
    for h in range(heads):
        for d in range(size):
            x_HD[h, d] = weight[h * size + d] * (x_HD[h, d] * scale)


@numba.njit(cache=True, nogil=True, fastmath=_FLAGS)
def _softmax_numerators(x, bits, count):  # type: ignore[no-untyped-def]
    """exp(x - max) of the first `count` values in place, to about 1 ulp, in a form that vectorises; their sum.

    `bits` is scratch for the powers of two.
    """
    top = x[0]
    for i in range(count):
        top = max(top, x[U(i)])
    power = bits.view(np.float32)
    for i in range(count):
        value = x[U(i)] - top
        if value < np.float32(-87.0):  # not max(), which would swallow a NaN
            value = np.float32(-87.0)
        whole = np.floor(value * np.float32(1.44269504) + np.float32(0.5))
        r = value - whole * np.float32(0.693359375)
        r = r + whole * np.float32(2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        x[U(i)] = p * r * r + r + np.float32(1.0)
        bits[U(i)] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    total = np.float32(0)
    for i in range(count):
        x[U(i)] *= power[U(i)]
        total += x[U(i)]
    return total


@numba.njit(cache=True, nogil=True, fastmath=_FLAGS)
def _score(head_dim, q, keys_BKSD, block, k, first, count, scale, scores, at):  # type: ignore[no-untyped-def]
    i = 0
    while i + 4 <= count:
        a, b, c, e = U(first + i), U(first + i + 1), U(first + i + 2), U(first + i + 3)
        dot_a = dot_b = dot_c = dot_e = np.float32(0)
        for d in range(head_dim):
            x = q[U(d)]
            dot_a += x * keys_BKSD[block, k, a, U(d)]
            dot_b += x * keys_BKSD[block, k, b, U(d)]
            dot_c += x * keys_BKSD[block, k, c, U(d)]
            dot_e += x * keys_BKSD[block, k, e, U(d)]
        scores[U(at + i)] = dot_a * scale
        scores[U(at + i + 1)] = dot_b * scale
        scores[U(at + i + 2)] = dot_c * scale
        scores[U(at + i + 3)] = dot_e * scale
        i += 4
    while i < count:
        dot = np.float32(0)
        for d in range(head_dim):
            dot += q[U(d)] * keys_BKSD[block, k, U(first + i), U(d)]
        scores[U(at + i)] = dot * scale
        i += 1


@numba.njit(cache=True, nogil=True, fastmath=_FLAGS)
def _add_values(head_dim, total_D, values_BKSD, block, k, first, count, scores, at):  # type: ignore[no-untyped-def]
    i = 0
    while i + 4 <= count:
        a, b, c, e = U(first + i), U(first + i + 1), U(first + i + 2), U(first + i + 3)
        w_a, w_b, w_c, w_e = scores[U(at + i)], scores[U(at + i + 1)], scores[U(at + i + 2)], scores[U(at + i + 3)]
        for d in range(head_dim):
            total_D[U(d)] += (
                w_a * values_BKSD[block, k, a, U(d)]
                + w_b * values_BKSD[block, k, b, U(d)]
                + w_c * values_BKSD[block, k, c, U(d)]
                + w_e * values_BKSD[block, k, e, U(d)]
            )
        i += 4
    while i < count:
        weight = scores[U(at + i)]
        for d in range(head_dim):
            total_D[U(d)] += weight * values_BKSD[block, k, U(first + i), U(d)]
        i += 1


@cache
def paged_attention(head_dim: int) -> Callable[..., Any]:
    """Each token attends to the positions up to its own (the last `window` of them, if not 0) of its sequence.

    Four keys at a time: one by one, the horizontal sums of the scores and the store-to-load chain of the output cost
    more than the arithmetic.
    """
    scale = np.float32(1.0 / math.sqrt(head_dim))

    @numba.njit(cache=True, nogil=True, fastmath=_FLAGS)
    def kernel(  # type: ignore[no-untyped-def]
        qkv_THD, num_heads, keys_BKSD, values_BKSD, table_RW, rows_T, positions_T, window, out_THD
    ):
        num_kv = keys_BKSD.shape[1]
        block_size = keys_BKSD.shape[2]
        group = num_heads // num_kv
        longest = 1
        for t in range(positions_T.shape[0]):
            longest = max(longest, positions_T[t] + 1)
        scores = np.empty(longest, np.float32)
        bits = np.empty(longest, np.int32)
        total_D = np.empty(head_dim, np.float32)
        for t in range(positions_T.shape[0]):
            row = rows_T[t]
            end = positions_T[t] + 1
            begin = max(0, end - window) if window > 0 else 0
            blocks = range(begin // block_size, (end + block_size - 1) // block_size)
            for h in range(num_heads):
                k = U(h // group)
                for b in blocks:
                    start = max(b * block_size, begin)
                    count = min((b + 1) * block_size, end) - start
                    first = start - b * block_size
                    block = U(table_RW[row, b])
                    _score(head_dim, qkv_THD[t, h], keys_BKSD, block, k, first, count, scale, scores, start - begin)
                inverse = np.float32(1) / _softmax_numerators(scores, bits, end - begin)
                for d in range(head_dim):
                    total_D[U(d)] = np.float32(0)
                for b in blocks:
                    start = max(b * block_size, begin)
                    count = min((b + 1) * block_size, end) - start
                    first = start - b * block_size
                    block = U(table_RW[row, b])
                    _add_values(head_dim, total_D, values_BKSD, block, k, first, count, scores, start - begin)
                for d in range(head_dim):
                    out_THD[t, h, d] = total_D[U(d)] * inverse

    return kernel
