"""RMSNorm of whole rows with the residual added in the same pass, and the gated SiLU of the MLP.

Twins: `inference.model.layers.rms_norm` and `gated_silu`, rounding for rounding.

Suffixes: T tokens, M features.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from inference.kernels.gpu_launch import Launch

PLAIN, ADD_BEFORE, ADD_AFTER = 0, 1, 2
_BLOCK = 1024


def rms_norm(x_TM: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x), [T, M]"""
    out_TM = torch.empty_like(x_TM)
    norm_launch(x_TM, x_TM, weight, out_TM, eps, PLAIN).run()
    return out_TM


def add_rms_norm(x_TM: torch.Tensor, y_TM: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x becomes x + y; norm(x + y), [T, M]"""
    out_TM = torch.empty_like(x_TM)
    norm_launch(x_TM, y_TM, weight, out_TM, eps, ADD_BEFORE).run()
    return out_TM


def rms_norm_add(x_TM: torch.Tensor, y_TM: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """x becomes x + norm(y)"""
    norm_launch(x_TM, y_TM, weight, x_TM, eps, ADD_AFTER).run()


def gated_silu(gate_up_TM: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, M / 2]"""
    out_TM = torch.empty((len(gate_up_TM), gate_up_TM.shape[1] // 2), dtype=gate_up_TM.dtype, device=gate_up_TM.device)
    silu_launch(gate_up_TM, out_TM).run()
    return out_TM


def norm_launch(
    x_TM: torch.Tensor, y_TM: torch.Tensor, weight: torch.Tensor, out_TM: torch.Tensor, eps: float, mode: int
) -> Launch:
    assert x_TM.is_contiguous() and y_TM.is_contiguous() and out_TM.is_contiguous()
    block = triton.next_power_of_2(x_TM.shape[1])
    return Launch(
        _rms_norm,
        (len(x_TM),),
        (x_TM, y_TM, weight, out_TM, eps),
        {"SIZE": x_TM.shape[1], "BLOCK": block, "MODE": mode},
        {"num_warps": 4 if block <= 2048 else 8, "num_stages": 1},
    )


def silu_launch(gate_up_TM: torch.Tensor, out_TM: torch.Tensor) -> Launch:
    assert gate_up_TM.is_contiguous() and out_TM.is_contiguous()
    size = out_TM.shape[1]
    return Launch(
        _gated_silu,
        (len(out_TM), triton.cdiv(size, _BLOCK)),
        (gate_up_TM, out_TM),
        {"SIZE": size, "BLOCK": _BLOCK},
        {"num_warps": 4, "num_stages": 1},
    )


@triton.jit
def _rms_norm(x, y, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    """MODE 0: out = norm(x). 1: x = x + y, out = norm(x). 2: x = x + norm(y)."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    there = i < SIZE
    residual = tl.load(x + row + i, mask=there, other=0.0)
    dtype = residual.dtype
    value = residual.to(tl.float32)
    if MODE == 1:
        value = (value + tl.load(y + row + i, mask=there, other=0.0).to(tl.float32)).to(dtype)
        tl.store(x + row + i, value, mask=there)
        value = value.to(tl.float32)
    if MODE == 2:
        value = tl.load(y + row + i, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = (value * scale).to(dtype).to(tl.float32)
    result = (tl.load(weight + i, mask=there, other=0.0).to(tl.float32) * normed).to(dtype)
    if MODE == 2:
        result = (residual.to(tl.float32) + result.to(tl.float32)).to(dtype)
    tl.store(out + row + i, result, mask=there)


@triton.jit
def _gated_silu(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=there, other=0.0)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=there, other=0.0).to(tl.float32)
    gate32 = gate.to(tl.float32)
    silu = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * SIZE + i, (silu * up).to(gate.dtype), mask=there)
