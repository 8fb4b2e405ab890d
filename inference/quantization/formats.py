"""The formats that weights can be quantised to, by the name a user gives and by the dtype that rows are stored as."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inference.quantization import int4, int8
from inference.quantization.sizes import int4_row_bytes, int8_row_bytes
from olmorl.contract.generation import Quantization

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Format:
    """Rows of bytes, one an output; no two formats have the same dtype."""

    dtype: torch.dtype
    max_features: int
    row_bytes: Callable[[int], int]
    quantize_rows: Callable[[torch.Tensor], torch.Tensor]
    dequantize_rows: Callable[[torch.Tensor, int], torch.Tensor]
    linear: Linear


FORMATS: dict[Quantization, Format] = {
    "int8": Format(
        torch.int8, int8.MAX_FEATURES, int8_row_bytes, int8.quantize_rows, int8.dequantize_rows, int8.int8_linear
    ),
    "int4": Format(
        torch.uint8, int4.MAX_FEATURES, int4_row_bytes, int4.quantize_rows, int4.dequantize_rows, int4.int4_linear
    ),
}
BY_DTYPE = {one.dtype: one for one in FORMATS.values()}
