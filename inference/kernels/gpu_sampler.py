"""Drawing tokens for all rows of a step in one pass over the logits, with both logprobs of what was drawn.

Gumbel-max with the counter hash of `inference.noise`, so that the tokens are those of the other backends. Temperature
costs nothing extra. Rows with penalties or masked ids are written out once more by `process_launch`; truncation is a
threshold that the draw compares with. Nothing is sorted and nothing waits for the host: what was drawn is counted for
the next step's penalties where it was drawn.

Twin: `inference.sampler.sample_torch`.

Suffixes: R rows, V vocabulary, N chunks of the vocabulary, C rows of counts, E masked ids of a row.
"""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inference.kernels.gpu_launch import Launch

CHUNK = 2048  # tokens a program looks at
_FIELDS = 7  # of a chunk: top, sum, raw top, raw sum, best score, its logit, its raw logit


@dataclass(frozen=True, slots=True)
class Draw:
    """What comes out, on the device."""

    token_ids_R: torch.Tensor  # int64
    scores_R4: torch.Tensor  # float32: logprob, raw logprob, log-sum-exp, raw log-sum-exp


def process_launch(
    logits_RV: torch.Tensor,
    scales_R: torch.Tensor,
    penalties_R3: torch.Tensor,
    count_rows_R: torch.Tensor,
    counts_CV: torch.Tensor,
    masked_RE: torch.Tensor,
    out_RV: torch.Tensor,
    in_prompt: int,
) -> Launch:
    """Logits after penalties (repetition, frequency, presence), masked ids and temperature.

    `count_rows_R` (int32) is -1 where there is no penalty, `masked_RE` (int32) where there is no id. Counts are int32:
    how often a token stands in the output, plus `in_prompt` (a power of two) if it stands in the prompt. `out_RV` may
    be wider than the vocabulary: what lies behind becomes -inf.
    """
    rows, size = logits_RV.shape
    assert logits_RV.stride(1) == 1 and out_RV.is_contiguous() and counts_CV.is_contiguous()
    width = out_RV.shape[1]
    return Launch(
        _process,
        (rows, triton.cdiv(width, CHUNK)),
        (
            logits_RV, scales_R, penalties_R3, count_rows_R, counts_CV, masked_RE, out_RV, logits_RV.stride(0), size,
            width, masked_RE.shape[1],
        ),
        {"BLOCK": CHUNK, "IN_PROMPT": in_prompt},
        {"num_warps": 8, "num_stages": 1},
    )  # fmt: skip


def draw_launches(
    logits_RV: torch.Tensor,
    x_RV: torch.Tensor | None,
    scales_R: torch.Tensor,
    greedy_R: torch.Tensor,
    words_R2: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor] | None,
    counts: tuple[torch.Tensor, torch.Tensor] | None,
    draw: Draw,
) -> list[Launch]:
    """Draws from `x_RV`, or from the logits divided by `scales_R`.

    `greedy_R` and `words_R2` are int32, `limits` what a truncation wrote, `counts` the rows of counts (-1: none) and
    the counts, in which the drawn token is then counted.
    """
    rows, size = logits_RV.shape
    chunks = triton.cdiv(size, CHUNK)
    assert logits_RV.stride(1) == 1 and (x_RV is None or x_RV.stride(1) == 1)
    parts = torch.empty((rows, _FIELDS, chunks), dtype=torch.float32, device=logits_RV.device)
    part_ids = torch.empty((rows, chunks), dtype=torch.int32, device=logits_RV.device)
    thresholds_R, last_ids_R = limits or (scales_R, greedy_R)
    count_rows_R, counts_CV = counts or (greedy_R, greedy_R)
    return [
        Launch(
            _draw,
            (rows, chunks),
            (
                logits_RV, logits_RV if x_RV is None else x_RV, scales_R, greedy_R, words_R2, thresholds_R, last_ids_R,
                parts, part_ids, logits_RV.stride(0), (logits_RV if x_RV is None else x_RV).stride(0), size,
            ),
            {"BLOCK": CHUNK, "PROCESSED": x_RV is not None, "LIMITED": limits is not None},
            {"num_warps": 8, "num_stages": 1},
        ),
        Launch(
            _merge,
            (rows,),
            (parts, part_ids, draw.token_ids_R, draw.scores_R4, count_rows_R, counts_CV, size, chunks),
            {"CHUNKS": triton.next_power_of_2(chunks), "COUNTED": counts is not None},
            {"num_warps": 1, "num_stages": 1},
        ),
    ]  # fmt: skip


@triton.jit(do_not_specialize=["num_masked"])
def _process(
    logits,
    scales,
    penalties,
    count_rows,
    counts,
    masked,
    out,
    step,
    size,
    width,
    num_masked,
    BLOCK: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = ids < size
    x = tl.load(logits + row * step + ids, mask=there, other=0.0)
    count_row = tl.load(count_rows + row).to(tl.int64)
    count = tl.load(counts + count_row * size + ids, mask=there & (count_row >= 0), other=0)
    repetition = tl.load(penalties + 3 * row)
    x = tl.where(count > 0, tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
    output = count & (IN_PROMPT - 1)
    penalty = tl.load(penalties + 3 * row + 1) * output.to(tl.float32) + tl.load(penalties + 3 * row + 2)
    x = tl.where(output > 0, x - penalty, x)
    for e in range(num_masked):
        x = tl.where(ids == tl.load(masked + row * num_masked + e), float("-inf"), x)
    x = tl.where(there, tl.div_rn(x, tl.load(scales + row)), float("-inf"))
    tl.store(out + row * width + ids, x, mask=ids < width)


@triton.jit
def hash_tokens(ids, first_word, second_word):
    """`inference.noise.hash_tokens`"""
    x = ids.to(tl.uint32) * 0x9E3779B1 + first_word
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B + second_word
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel(bits):
    """`inference.noise.gumbel`. log1p(-w) is log(u) scaled by how far u = 1 - w missed 1 - w."""
    w = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = tl.minimum(w, 0.99999994)
    u = 1.0 - w
    missed = 1.0 - u
    exponential = tl.where(missed > 0, tl.div_rn(-tl.log(u) * w, tl.where(missed > 0, missed, 1.0)), w)
    return -tl.log(exponential)


@triton.jit
def _draw(
    logits,
    processed,
    scales,
    greedy,
    words,
    thresholds,
    last_ids,
    parts,
    part_ids,
    step,
    processed_step,
    size,
    BLOCK: tl.constexpr,
    PROCESSED: tl.constexpr,
    LIMITED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    there = ids < size
    raw = tl.load(logits + row * step + ids, mask=there, other=float("-inf"))
    raw_top = tl.max(raw, 0)
    raw_sum = tl.sum(tl.exp(raw - tl.where(raw_top == float("-inf"), 0.0, raw_top)), 0)
    if PROCESSED:
        x = tl.load(processed + row * processed_step + ids, mask=there, other=float("-inf"))
    else:
        x = tl.div_rn(raw, tl.load(scales + row))
    if LIMITED:
        threshold = tl.load(thresholds + row)
        kept = (x > threshold) | ((x == threshold) & (ids <= tl.load(last_ids + row))) | (x != x)
        x = tl.where(kept, x, float("-inf"))
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
    first_word = tl.load(words + 2 * row).to(tl.uint32, bitcast=True)
    second_word = tl.load(words + 2 * row + 1).to(tl.uint32, bitcast=True)
    noise = gumbel(hash_tokens(ids, first_word, second_word))
    score = tl.where(tl.load(greedy + row) != 0, x, x + noise)
    score = tl.where(score == score, score, float("-inf"))
    best, at = tl.max(score, 0, return_indices=True)
    chosen = tl.arange(0, BLOCK) == at
    field = parts + row * 7 * chunks + chunk
    tl.store(field, top)
    tl.store(field + chunks, total)
    tl.store(field + 2 * chunks, raw_top)
    tl.store(field + 3 * chunks, raw_sum)
    tl.store(field + 4 * chunks, best)
    tl.store(field + 5 * chunks, tl.max(tl.where(chosen, x, float("-inf")), 0))
    tl.store(field + 6 * chunks, tl.max(tl.where(chosen, raw, float("-inf")), 0))
    tl.store(part_ids + row * chunks + chunk, chunk * BLOCK + at)


@triton.jit
def _log_sum(tops, sums):
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))


@triton.jit
def _merge(
    parts,
    part_ids,
    token_ids,
    scores,
    count_rows,
    counts,
    size,
    chunks,
    CHUNKS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, CHUNKS)
    there = n < chunks
    field = parts + row * 7 * chunks + n
    lowest = float("-inf")
    lse = _log_sum(tl.load(field, mask=there, other=lowest), tl.load(field + chunks, mask=there, other=0.0))
    raw_lse = _log_sum(
        tl.load(field + 2 * chunks, mask=there, other=lowest), tl.load(field + 3 * chunks, mask=there, other=0.0)
    )
    _, at = tl.max(tl.load(field + 4 * chunks, mask=there, other=lowest), 0, return_indices=True)
    token = tl.load(part_ids + row * chunks + at)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(scores + 4 * row, tl.load(parts + row * 7 * chunks + 5 * chunks + at) - lse)
    tl.store(scores + 4 * row + 1, tl.load(parts + row * 7 * chunks + 6 * chunks + at) - raw_lse)
    tl.store(scores + 4 * row + 2, lse)
    tl.store(scores + 4 * row + 3, raw_lse)
    if COUNTED:
        count_row = tl.load(count_rows + row).to(tl.int64)
        count = counts + count_row * size + token
        old = tl.load(count, mask=count_row >= 0, other=0)
        tl.store(count, old + 1, mask=count_row >= 0)
