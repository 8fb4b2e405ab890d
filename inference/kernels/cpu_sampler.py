"""Drawing tokens for all rows of a step in one pass over the logits, with the logprobs of what was drawn.

Gumbel-max with the counter hash of `inference.noise`; temperature is the only rule known here. Rows lie side by side
in memory, [V, R]. The vocabulary is cut into chunks that threads share; chunks are merged in order, so the result does
not depend on who took which.

Twin: `inference.sampler.sample_torch`.

Suffixes: R rows, V vocabulary, J lanes of a panel of rows.
"""

import math
from typing import NamedTuple

import numpy as np

from inference.kernels.compiling import exact
from inference.kernels.cpu_math import address
from inference.kernels.cpu_team import meet, take
from inference.kernels.cpu_tile import LANES
from inference.kernels.cpu_vocabulary import block_max, block_sums

CHUNK = 4096  # tokens
_BLOCK = 64  # tokens between two looks at the best score
_NOTHING = np.float32(-3e38)  # stands for -inf, from which nothing can be subtracted
_MARGIN = np.float32(1 + 2.0**-12)  # over rounding and the missing bits of the coarse test

# Rows of the partial results of a chunk.
_TOP, _RAW_TOP, _SUM, _RAW_SUM, _BEST, _BEST_X, _BEST_RAW = range(7)
NUM_FIELDS = 7


class Draw(NamedTuple):
    temperatures_R: np.ndarray  # float32, 1 where greedy
    greedy_R: np.ndarray  # bool
    words_2R: np.ndarray  # uint32
    token_ids_R: np.ndarray  # int64, out
    scores_2R: np.ndarray  # float32, out: the drawn token's logit divided by temperature, and its logit
    lse_2R: np.ndarray  # float32, out: log-sum-exp of both


@exact
def draw(thread, threads, signals, logits_VR, draw, parts, part_ids):  # type: ignore[no-untyped-def]
    """Rows in whole panels. `parts` [panels, chunks, field, lane] and `part_ids` [panels, chunks, lane] are scratch."""
    panels, chunks = part_ids.shape[:2]
    while True:
        item = take(signals, 0, 1)
        if item >= panels * chunks:
            break
        panel, chunk = item // chunks, item % chunks
        row = panel * LANES
        scaled = draw.temperatures_R[row] != 1
        for r in range(row + 1, row + LANES):
            scaled |= draw.temperatures_R[r] != 1
        first, last = chunk * CHUNK, min((chunk + 1) * CHUNK, len(logits_VR))
        _scan(logits_VR, row, first, last, scaled, draw, parts[panel, chunk], part_ids[panel, chunk])
    meet(signals, threads, 0)
    for row in range(thread, panels * LANES, threads):
        _merge(parts[row // LANES, :, :, row % LANES], part_ids[row // LANES, :, row % LANES], row, draw)


@exact
def _scan(logits_VR, row, first, last, scaled, draw, part, part_ids):  # type: ignore[no-untyped-def]
    step = logits_VR.shape[1]
    words = np.empty((2, LANES), np.uint32)
    words[:] = draw.words_2R[:, row : row + LANES]
    temperatures = draw.temperatures_R[row : row + LANES]
    hits = np.empty(_BLOCK, np.uint16)
    bounds = np.empty(LANES, np.float32)
    part[:_SUM] = _NOTHING
    part[_SUM:_BEST] = 0
    part[_BEST] = -np.inf
    part_ids[:] = first
    begin, size = first, 4
    while begin < last:
        count = min(size, last - begin)
        base = address(logits_VR[begin:, row:])
        _raise_top(base, step, count, scaled, temperatures, part)
        for j in range(LANES):
            bounds[j] = _bound(part[_TOP, j], part[_BEST, j])
        if scaled:
            block_sums(
                base, step, count, begin, address(words), address(temperatures), address(part[_TOP:]),
                address(bounds), address(part[_SUM:]), address(hits), 1,
            )  # fmt: skip
        else:
            block_sums(
                base, step, count, begin, address(words), address(temperatures), address(part[_TOP:]),
                address(bounds), address(part[_SUM:]), address(hits), 0,
            )  # fmt: skip
        for v in range(count):
            if hits[v] != 0:
                for j in range(LANES):
                    if hits[v] >> j & 1:
                        _compete(logits_VR[begin + v, row + j], begin + v, j, row + j, draw, part, part_ids)
        begin += count
        size = min(2 * size, _BLOCK)
    if not scaled:
        part[_RAW_TOP] = part[_TOP]
        part[_RAW_SUM] = part[_SUM]


@exact
def _raise_top(base, step, count, scaled, temperatures, part):  # type: ignore[no-untyped-def]
    """The highest logit so far, and the sums so far relative to it."""
    before = part[:_SUM].copy()
    block_max(base, step, count, address(part[_RAW_TOP:]))
    for j in range(LANES):
        if not scaled:
            part[_TOP, j] = max(part[_TOP, j], part[_RAW_TOP, j])
        else:
            part[_TOP, j] = part[_RAW_TOP, j] / temperatures[j]
            if before[_RAW_TOP, j] != part[_RAW_TOP, j]:
                part[_RAW_SUM, j] *= math.exp(before[_RAW_TOP, j] - part[_RAW_TOP, j])
        if before[_TOP, j] != part[_TOP, j]:
            part[_SUM, j] *= math.exp(before[_TOP, j] - part[_TOP, j])


@exact
def _bound(top, best):  # type: ignore[no-untyped-def]
    if best == -np.inf:
        return np.float32(np.inf)
    return np.float32(math.exp(min(np.float32(80), top - best))) * _MARGIN


@exact
def _compete(raw, token, j, row, draw, part, part_ids):  # type: ignore[no-untyped-def]
    x = raw / draw.temperatures_R[row]
    score = x
    if not draw.greedy_R[row]:
        score = x + gumbel(hash_token(token, draw.words_2R[0, row], draw.words_2R[1, row]))
    if score > part[_BEST, j]:
        part[_BEST, j] = score
        part[_BEST_X, j] = x
        part[_BEST_RAW, j] = raw
        part_ids[j] = token


@exact
def hash_token(token, first_word, second_word):  # type: ignore[no-untyped-def]
    """`inference.noise.hash_tokens` for one token"""
    x = np.uint32(token) * np.uint32(0x9E3779B1) + first_word
    x = np.uint32(x)
    x ^= x >> np.uint32(16)
    x = np.uint32(x * np.uint32(0x85EBCA6B) + second_word)
    x ^= x >> np.uint32(13)
    x = np.uint32(x * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))


@exact
def gumbel(bits):  # type: ignore[no-untyped-def]
    """`inference.noise.gumbel` for one hash, operation by operation in float32"""
    w = (np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32)
    w = min(w, np.float32(1 - 2.0**-24))
    return -np.log(-np.log1p(-w))


@exact
def _merge(part, part_ids, row, draw):  # type: ignore[no-untyped-def]
    best = 0
    for chunk in range(len(part)):
        if part[chunk, _BEST] > part[best, _BEST]:
            best = chunk
    draw.token_ids_R[row] = part_ids[best]
    draw.scores_2R[0, row] = part[best, _BEST_X]
    draw.scores_2R[1, row] = part[best, _BEST_RAW]
    draw.lse_2R[0, row] = _log_sum(part[:, _TOP], part[:, _SUM])
    draw.lse_2R[1, row] = _log_sum(part[:, _RAW_TOP], part[:, _RAW_SUM])


@exact
def _log_sum(tops, sums):  # type: ignore[no-untyped-def]
    top = tops[0]
    for chunk in range(len(tops)):
        top = max(top, tops[chunk])
    if top <= _NOTHING:
        return np.float32(-np.inf)
    total = 0.0
    for chunk in range(len(tops)):
        total += sums[chunk] * math.exp(tops[chunk] - top)
    return np.float32(top + math.log(total))
