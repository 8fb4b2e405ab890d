"""top_k, top_p and min_p of whole rows without sorting the vocabulary.

A histogram of the distances from the highest logit tells how far down the kept tokens can reach; only what lies above
that is sorted. Thresholds are judged as in the twin, on float32 masses after top_k.

Twin: `inference.sampler.kept_tokens`.

Suffixes: S rows, V vocabulary, B bins, C candidates.
"""

import numpy as np

from inference.kernels.compiling import exact
from inference.kernels.cpu_math import exp
from inference.kernels.cpu_reduce import highest, sum_of
from inference.kernels.cpu_team import take

_BINS = 1024
_PER_NAT = np.float32(16)
_PART = 256  # masses summed in float32, or what small ones add up to would be lost
U = np.uint64


@exact
def truncate(thread, threads, signals, logits_SV, top_k_S, top_p_S, min_p_S):  # type: ignore[no-untyped-def]
    """Dropped tokens become -inf, in place. Rows that are no distribution (NaN, +inf) stay as they are."""
    while True:
        row = take(signals, 0, 1)
        if row >= len(logits_SV):
            return
        _truncate_row(logits_SV[row], top_k_S[row], np.float32(top_p_S[row]), np.float32(min_p_S[row]))


@exact
def _truncate_row(x_V, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    top, total = _mass(x_V)
    if not np.isfinite(top) or np.isnan(total):
        return
    last = _last_bin(x_V, top, total, top_k, top_p)
    ids_C = _within(x_V, top, last)
    kept_C = _kept(x_V, ids_C, top, total, top_k, top_p, min_p)
    values_C = x_V[kept_C]
    x_V[:] = -np.inf
    for c in range(len(kept_C)):
        x_V[kept_C[c]] = values_C[c]


@exact
def _mass(x_V):  # type: ignore[no-untyped-def]
    """The highest logit, and the sum of exp(x - highest)."""
    top, mass, masses = highest(x_V), 0.0, np.empty(_PART, np.float32)
    for start in range(0, len(x_V), _PART):
        count = min(_PART, len(x_V) - start)
        for v in range(count):
            masses[U(v)] = exp(x_V[U(start + v)] - top)
        mass += sum_of(masses[:count])
    return top, mass


@exact
def _last_bin(x_V, top, total, top_k, top_p):  # type: ignore[no-untyped-def]
    """Kept tokens lie in the bins up to this one. Bins count distances from the top in sixteenths of a nat."""
    if top_k == 0 and top_p >= 1:
        return _BINS - 1
    counts_B = np.zeros(_BINS, np.int64)
    for v in range(len(x_V)):
        counts_B[_bin(top - x_V[U(v)])] += 1
    # With both, all of top_k are needed, for top_p is of their mass.
    wanted = top_k if top_k > 0 else len(x_V)
    enough = np.float64(top_p) * total * (1 + 1e-5) if top_k == 0 else np.inf
    count, mass = 0, 0.0
    for b in range(_BINS - 1):
        count += counts_B[b]
        mass += counts_B[b] * np.exp(-(b + 1) / _PER_NAT)  # at least
        if count >= wanted or mass >= enough:
            return b
    return _BINS - 1


@exact
def _within(x_V, top, last):  # type: ignore[no-untyped-def]
    ids_C = np.empty(len(x_V), np.int32)
    found = 0
    for v in range(len(x_V)):
        ids_C[found] = v
        found += _bin(top - x_V[U(v)]) <= last
    return ids_C[:found]


@exact
def _bin(distance):  # type: ignore[no-untyped-def]
    return np.int64(distance * _PER_NAT) if distance < np.float32((_BINS - 1) / _PER_NAT) else _BINS - 1


@exact
def _kept(x_V, ids_C, top, total, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    if top_k > 0 or top_p < 1:
        ids_C = ids_C[np.argsort(-x_V[ids_C], kind="mergesort")]
    if top_k > 0:
        ids_C = ids_C[:top_k]
        total = 0.0
        for c in range(len(ids_C)):
            total += exp(x_V[ids_C[c]] - top)
    least = min_p * np.float32(1 / total)
    before = 0.0
    kept = 0
    for c in range(len(ids_C)):
        mass = np.float32(exp(x_V[ids_C[c]] - top) / total)
        if top_p < 1 and not np.float32(before) < top_p:
            break
        before += mass
        if mass >= least:
            ids_C[kept] = ids_C[c]
            kept += 1
    return ids_C[:kept]
