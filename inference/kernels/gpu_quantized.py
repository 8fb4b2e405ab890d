"""Products with weights in int8 and int4 on a GPU.

int8: a token becomes two planes of signed bytes and a scale, as on a CPU (tokens in 8 bits alone would lose ten times
what the weights lose, docs/numerics.md); both planes meet a weight that was read once, in tensor cores that count in
int32. Results equal the definition, `inference.quantization.int8`, bit for bit but for the dtype they are stored in.

int4: weights alone; tokens stay as they are. Within a group tokens meet whole numbers, which any dtype holds exactly,
and scale and minimum come in behind the product, so nothing is rounded on the way. Of four bytes of weights the low
halves are four features and the high halves the next four: two products, of tokens read in fours, in place of a
shuffle. Twin: the product with `inference.quantization.int4.dequantize_rows`.

Suffixes: T tokens, K inputs, N outputs, B bytes of a row.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from inference.kernels.gpu_launch import Launch, interpreted, run
from inference.quantization.rows import SMALLEST, TOKEN_LEVELS
from inference.quantization.sizes import GROUP, num_groups, tail_at

_CHUNK = 1024  # features of a token rounded at once
_EACH_ROUNDING = {"enable_fp_fusion": 0}  # a product and a sum in one would round once where the definition does twice


def quantized_linear(
    x_TK: torch.Tensor, rows_NB: torch.Tensor, bias_N: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[T, N] in `dtype`, None: that of `x_TK`; the format is read off the dtype of the rows."""
    out_TN = torch.empty((len(x_TK), len(rows_NB)), dtype=dtype or x_TK.dtype, device=x_TK.device)
    launches = int8_launches if rows_NB.dtype == torch.int8 else int4_launches
    run(launches(x_TK.contiguous(), rows_NB, bias_N, out_TN))
    return out_TN


def int8_launches(
    x_TK: torch.Tensor, rows_NB: torch.Tensor, bias_N: torch.Tensor | None, out_TN: torch.Tensor
) -> list[Launch]:
    tokens, features = x_TK.shape
    planes_2TK = torch.empty((2, tokens, features), dtype=torch.int8, device=x_TK.device)
    scales_T = torch.empty(tokens, dtype=torch.float32, device=x_TK.device)
    digits = Launch(
        _token_digits,
        (tokens,),
        (x_TK, planes_2TK, scales_T, planes_2TK.stride(0)),
        {"SIZE": features, "CHUNK": _CHUNK, "LEVELS": TOKEN_LEVELS, "SMALLEST": SMALLEST},
        {"num_warps": 4, "num_stages": 1, **_EACH_ROUNDING},
    )
    block_t, block_n, block_k, warps, stages = _int8_blocks(tokens)
    scales_NX = rows_NB.view(torch.float32)
    product = Launch(
        _int8_product,
        (triton.cdiv(rows_NB.shape[0], block_n), triton.cdiv(tokens, block_t)),
        (
            planes_2TK, scales_T, rows_NB, scales_NX, scales_T if bias_N is None else bias_N, out_TN,
            tokens, len(rows_NB), planes_2TK.stride(0), rows_NB.stride(0), scales_NX.stride(0),
            tail_at(features) // 4,
        ),
        {"SIZE": features, "BLOCK_T": block_t, "BLOCK_N": block_n, "BLOCK_K": block_k, "BIAS": bias_N is not None},
        {"num_warps": warps, "num_stages": stages, **_EACH_ROUNDING},
    )  # fmt: skip
    return [digits, product]


def int4_launches(
    x_TK: torch.Tensor, rows_NB: torch.Tensor, bias_N: torch.Tensor | None, out_TN: torch.Tensor
) -> list[Launch]:
    tokens, features = x_TK.shape
    groups = num_groups(features)
    block_t, block_n, warps, stages = _int4_blocks(tokens, x_TK.dtype)
    ends_NX = rows_NB.view(torch.bfloat16)
    return [
        Launch(
            _int4_product,
            (triton.cdiv(rows_NB.shape[0], block_n), triton.cdiv(tokens, block_t)),
            (
                x_TK, rows_NB, ends_NX, x_TK if bias_N is None else bias_N, out_TN,
                tokens, len(rows_NB), rows_NB.stride(0), ends_NX.stride(0), groups * GROUP // 4,
            ),
            {
                "SIZE": features, "GROUPS": groups, "HALF": GROUP // 2, "BLOCK_T": block_t, "BLOCK_N": block_n,
                "BIAS": bias_N is not None, "WIDEN": interpreted(),
            },
            {"num_warps": warps, "num_stages": stages},
        )
    ]  # fmt: skip


def _int8_blocks(tokens: int) -> tuple[int, int, int, int, int]:
    """Tokens, outputs and inputs of a block, warps, stages. Few tokens are bound by reading weights."""
    if tokens <= 16:
        return 16, 32, 256, 4, 4
    return (64, 64, 128, 4, 3) if tokens <= 64 else (64, 128, 64, 8, 4)


def _int4_blocks(tokens: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    if dtype == torch.float32:  # without tensor cores, for tests and debugging
        return 16, 32, 4, 1
    if tokens <= 16:
        return 16, 64, 4, 4
    return (64, 64, 4, 4) if tokens <= 64 else (64, 128, 8, 4)


@triton.jit
def _token_digits(
    x, planes, scales, plane, SIZE: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, SMALLEST: tl.constexpr
):
    """x = scale * (256 * high + low), as `inference.quantization.rows.token_digits`."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, CHUNK)
    largest = tl.full([CHUNK], SMALLEST, tl.float32)
    for start in range(0, SIZE, CHUNK):
        value = tl.load(x + token * SIZE + start + k, mask=start + k < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(largest, 0)
    poison = tl.sum(largest * 0.0, 0)  # what is not finite makes the scale so
    tl.store(scales + token, tl.div_rn(top, LEVELS * 1.0) + poison)
    inverse = tl.div_rn(LEVELS * 1.0, top)
    for start in range(0, SIZE, CHUNK):
        there = start + k < SIZE
        value = tl.load(x + token * SIZE + start + k, mask=there, other=0.0).to(tl.float32)
        rounded = (value * inverse + 12582912.0) - 12582912.0  # to even
        q = rounded.to(tl.int32)
        high = (q + 128) >> 8
        tl.store(planes + token * SIZE + start + k, high.to(tl.int8), mask=there)
        tl.store(planes + plane + token * SIZE + start + k, (q - 256 * high).to(tl.int8), mask=there)


@triton.jit
def _int8_product(
    planes, token_scales, rows, scales, bias, out, tokens, outputs, plane, row, scale_row, scale_at,
    SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    x_at = planes + t.to(tl.int64)[:, None] * SIZE + k[None, :]
    w_at = rows + n.to(tl.int64)[None, :] * row + k[:, None]
    high, low = tl.zeros([BLOCK_T, BLOCK_N], tl.int32), tl.zeros([BLOCK_T, BLOCK_N], tl.int32)
    for start in range(0, SIZE, BLOCK_K):
        there = start + k < SIZE
        x_there = there[None, :] & (t < tokens)[:, None]
        w = tl.load(w_at + start, mask=there[:, None] & (n < outputs)[None, :], other=0)
        high = tl.dot(tl.load(x_at + start, mask=x_there, other=0), w, high, out_dtype=tl.int32)
        low = tl.dot(tl.load(x_at + plane + start, mask=x_there, other=0), w, low, out_dtype=tl.int32)
    scale = tl.load(scales + n.to(tl.int64) * scale_row + scale_at, mask=n < outputs, other=0.0)
    token_scale = tl.load(token_scales + t, mask=t < tokens, other=0.0)
    value = (high.to(tl.float32) * 256.0 + low.to(tl.float32)) * scale[None, :] * token_scale[:, None]
    if BIAS:
        value += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    there = (t < tokens)[:, None] & (n < outputs)[None, :]
    tl.store(out + t.to(tl.int64)[:, None] * outputs + n[None, :], value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _int4_product(
    x, rows, ends, bias, out, tokens, outputs, row, end_row, ends_at,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """WIDEN: the interpreter would multiply the bits of bfloat16."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, HALF)
    first = j // 4 * 8 + j % 4  # feature of the low half of byte j
    x_at = x + t.to(tl.int64)[:, None] * SIZE + first[None, :]
    w_at = rows + n.to(tl.int64)[None, :] * row + j[:, None]
    end_at = ends + n.to(tl.int64) * end_row + ends_at
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for group in range(GROUPS):
        start = group * 2 * HALF
        low = tl.load(x_at + start, mask=(start + first < SIZE)[None, :] & (t < tokens)[:, None], other=0.0)
        high = tl.load(x_at + start + 4, mask=(start + 4 + first < SIZE)[None, :] & (t < tokens)[:, None], other=0.0)
        if WIDEN:
            low, high = low.to(tl.float32), high.to(tl.float32)
        w = tl.load(w_at + group * HALF, mask=(n < outputs)[None, :], other=0)
        product = tl.dot(low, (w & 15).to(tl.float32).to(low.dtype), input_precision="ieee")
        product = tl.dot(high, (w >> 4).to(tl.float32).to(low.dtype), product, input_precision="ieee")
        minimum = tl.load(end_at + 2 * group, mask=n < outputs, other=0.0).to(tl.float32)
        scale = tl.load(end_at + 2 * group + 1, mask=n < outputs, other=0.0).to(tl.float32)
        sums = tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
        total += product * scale[None, :] + sums[:, None] * minimum[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    there = (t < tokens)[:, None] & (n < outputs)[None, :]
    tl.store(out + t.to(tl.int64)[:, None] * outputs + n[None, :], total.to(out.dtype.element_ty), mask=there)
