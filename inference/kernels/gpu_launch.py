"""One call of a Triton kernel as a value: it can be run, or compiled for a GPU that is not here.

The report and the tests compile the very calls that the engine makes, specialised as Triton specialises them, so
that nothing ships that was never compiled. Kernels keep to what triton 3.6 and later share.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors; decided when they are imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "y", "yes")


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    """tensors, ints and floats, in the order of the kernel"""
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    """num_warps, num_stages, enable_fp_fusion"""

    def run(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    def compile(self, target: GPUTarget) -> Any:
        """For any target, without a GPU. Tensors may be on the meta device. Not in the interpreter."""
        names = self.kernel.arg_names
        signature = dict.fromkeys(names, "constexpr")
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        attributes = {}
        for index, value in enumerate(self.arguments):
            divisible = False
            if isinstance(value, torch.Tensor):
                signature[names[index]] = _TYPES[value.dtype]
                divisible = value.data_ptr() % 16 == 0 if value.device.type != "meta" else True
            elif isinstance(value, float):
                signature[names[index]] = "fp32"
            elif value == 1 and not self.kernel.params[index].do_not_specialize:
                constants[(index,)] = 1
            else:
                signature[names[index]] = "i32" if -(2**31) <= value < 2**31 else "i64"
                divisible = value % 16 == 0 and not self.kernel.params[index].do_not_specialize
            if divisible:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=self.options)


def run(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run()
