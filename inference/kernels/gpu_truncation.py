"""top_k, top_p and min_p as one threshold a row, found without sorting.

A row keeps the tokens above its threshold and, of those that equal it, the ones with the lowest ids. Floats order like
integers once the sign is seen to, so the threshold is searched for among integers, eight at a time: how many tokens,
or how much mass, lies above each.

Twin: `inference.sampler.kept_tokens`.

Suffixes: R rows, V vocabulary, B tokens of a block, J pivots.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from inference.kernels.gpu_launch import Launch

_BLOCK = 2048
_PIVOTS = 8  # more would leave the registers


def truncation_launch(
    x_RV: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    thresholds_R: torch.Tensor,
    last_ids_R: torch.Tensor,
) -> Launch:
    """`thresholds_R`: the lowest kept value; `last_ids_R` (int32): of the tokens that equal it, the highest kept id.

    `top_k_R` is int32, 0 where off.
    """
    return Launch(
        _truncate,
        (len(x_RV),),
        (x_RV, top_k_R, top_p_R, min_p_R, thresholds_R, last_ids_R, x_RV.stride(0), x_RV.shape[1]),
        {"BLOCK": _BLOCK, "PIVOTS": _PIVOTS},
        {"num_warps": 8, "num_stages": 1},
    )


@triton.jit
def _key(x):
    """An integer that orders as the float does."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _block(x, start, num_tokens, BLOCK: tl.constexpr):
    """A block of logits, -inf behind the last; + 0 makes one zero of the two."""
    ids = start + tl.arange(0, BLOCK)
    return tl.load(x + ids, mask=ids < num_tokens, other=float("-inf")) + 0.0


@triton.jit
def _above(x, keys_J, num_tokens, top, mass, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """[J] how many tokens lie above each of J values, or their mass."""
    pivots_J = _value(keys_J)
    above_J = tl.zeros_like(pivots_J)
    for start in range(0, num_tokens, BLOCK):
        x_B = _block(x, start, num_tokens, BLOCK)
        if BY_MASS:
            weight_B = tl.div_rn(tl.exp(x_B - top), mass)
        else:
            weight_B = tl.full([BLOCK], 1.0, tl.float32)
        above_J += tl.sum(tl.where(x_B[:, None] > pivots_J[None, :], weight_B[:, None], 0.0), 0)
    return above_J


@triton.jit
def _search(
    x, low, high, limit, num_tokens, top, mass, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """The lowest key in (low, high] that has less than `limit` above it, and what that is.

    So much or more is above `low`, less above `high`.
    """
    j = tl.arange(0, PIVOTS)
    while high - low > 1:
        width = high - low
        above_J = _above(x, low + (width * (j + 1) + PIVOTS - 1) // PIVOTS, num_tokens, top, mass, BY_MASS, BLOCK)
        first = tl.minimum(tl.sum((above_J >= limit).to(tl.int64), 0), PIVOTS - 1)
        high = low + (width * (first + 1) + PIVOTS - 1) // PIVOTS
        low = low + (width * first + PIVOTS - 1) // PIVOTS
    above_J = _above(x, high + tl.zeros([PIVOTS], tl.int64), num_tokens, top, mass, BY_MASS, BLOCK)
    return high, tl.max(above_J, 0)


@triton.jit
def _last_tie(x, value, ties, num_tokens, BLOCK: tl.constexpr):
    """The id of the token that is number `ties` among those that equal `value`."""
    last_id = num_tokens
    seen = 0
    for start in range(0, num_tokens, BLOCK):
        equal_B = (_block(x, start, num_tokens, BLOCK) == value).to(tl.int32)
        rank_B = seen + tl.cumsum(equal_B, 0)
        ids = start + tl.arange(0, BLOCK)
        last_id = tl.minimum(last_id, tl.min(tl.where((equal_B > 0) & (rank_B == ties), ids, num_tokens), 0))
        seen += tl.sum(equal_B, 0)
    return last_id


@triton.jit
def _truncate(
    x, top_ks, top_ps, min_ps, thresholds, last_ids, step, num_tokens, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x = x + row * step
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    threshold = tl.zeros([], tl.float32) + float("-inf")
    last_id = num_tokens
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        top_B = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, num_tokens, BLOCK):
            top_B = tl.maximum(top_B, _block(x, start, num_tokens, BLOCK))
        top = tl.max(top_B, 0)
        high = _key(top)
        lowest = _key(threshold)
        ties = num_tokens  # how many of the tokens at the threshold are kept
        if (top_k > 0) & (top_k < num_tokens):
            lowest, above = _search(
                x, lowest - 1, high, top_k.to(tl.float32), num_tokens, top, 1.0, False, BLOCK, PIVOTS
            )
            ties = top_k - above.to(tl.int32)
        threshold = _value(lowest)
        mass_B = tl.zeros([BLOCK], tl.float32)
        equal_B = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_tokens, BLOCK):
            x_B = _block(x, start, num_tokens, BLOCK)
            mass_B += tl.where(x_B > threshold, tl.exp(x_B - top), 0.0)
            equal_B += (x_B == threshold).to(tl.int32)
        mass = tl.sum(mass_B, 0)
        if threshold > float("-inf"):
            mass += tl.minimum(tl.sum(equal_B, 0), ties).to(tl.float32) * tl.exp(threshold - top)
        if top_p < 1.0:
            kth = lowest
            lowest, above = _search(x, kth - 1, high, top_p, num_tokens, top, mass, True, BLOCK, PIVOTS)
            threshold = _value(lowest)
            each = tl.div_rn(tl.exp(threshold - top), mass)
            fit = tl.minimum(tl.ceil(tl.div_rn(top_p - above, tl.maximum(each, 1e-30))), 1e9).to(tl.int32)
            ties = tl.minimum(fit, tl.where(lowest == kth, ties, num_tokens))
        if min_p > 0.0:
            # The lowest value whose mass is at least min_p of the largest.
            least = min_p * tl.div_rn(1.0, mass)
            low = _key(tl.zeros([], tl.float32) + float("-inf"))
            enough_key = high
            while enough_key - low > 1:
                middle = low + (enough_key - low) // 2
                enough = tl.div_rn(tl.exp(_value(middle) - top), mass) >= least
                enough_key = tl.where(enough, middle, enough_key)
                low = tl.where(enough, low, middle)
            if enough_key > lowest:
                threshold = _value(enough_key)
                ties = num_tokens
        if ties < num_tokens:
            last_id = _last_tie(x, threshold, ties, num_tokens, BLOCK)
    tl.store(thresholds + row, threshold)
    tl.store(last_ids + row, last_id)
