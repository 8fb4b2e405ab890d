"""RMSNorm with its residuals and the gated SiLU against torch."""

import pytest
import torch

from inference.kernels.gpu_norm import add_rms_norm, gated_silu, rms_norm, rms_norm_add
from inference.model import layers

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1, 48, 576, 4096])
def test_norms_equal_torch(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x, y, weight = (random(device, dtype, *shape) for shape in ((3, size), (4, size), (size,)))
    y = y[:3]
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), layers.rms_norm(x, weight, 1e-5), **close)

    before = x.clone()
    normed = add_rms_norm(before, y, weight, 1e-5)
    torch.testing.assert_close(before, x + y, **close)
    torch.testing.assert_close(normed, layers.rms_norm(x + y, weight, 1e-5), **close)

    after = x.clone()
    rms_norm_add(after, y, weight, 1e-5)
    torch.testing.assert_close(after, x + layers.rms_norm(y, weight, 1e-5), **close)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1, 1000, 1536])
def test_gated_silu_equals_torch(device: torch.device, dtype: torch.dtype, size: int) -> None:
    gate_up = 4 * random(device, dtype, 3, 2 * size)
    torch.testing.assert_close(
        gated_silu(gate_up), layers.gated_silu(gate_up), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_a_step_without_tokens(device: torch.device) -> None:
    weight = torch.ones(8, device=device)
    empty = torch.zeros((0, 8), device=device)
    assert rms_norm(empty, weight, 1e-5).shape == (0, 8)
    assert gated_silu(empty).shape == (0, 4)
