"""GPTQ and AWQ checkpoints: from their packed words to the dense weights that they stand for, and back.

Both store whole numbers q with a scale and a zero for each group of inputs: weight = (q - zero) * scale. They differ in
how the numbers lie in 32-bit words:

    GPTQ  qweight [K * bits / 32, N], a column's numbers one behind the other, lowest bits first (of 3 bits, some lie
          across two words); zeros likewise along N, less one in format v1, as they are in v2; g_idx [K] says which
          group an input is of, where `desc_act` took them out of order
    AWQ   qweight [K, N / 8], 4 bits; of the eight columns of a word the even ones come first; zeros likewise

Suffixes: N outputs, K inputs, G groups, W words.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from inference.quantization.grid import Quantized
from olmorl.contract.errors import ModelError

PARTS = ("qweight", "qzeros", "scales", "g_idx")
WIDTHS = {"gptq": (2, 3, 4, 8), "awq": (4,)}  # bits that a format has words for
_LAYOUTS = {
    "gptq": (("checkpoint_format", "format"), {"gptq": 1, "gptq_v2": 0}),
    "awq": (("version", "format"), {"gemm": 0}),
}
"""where a config names the layout, the first that is there; and of each layout, the usual one first, what a stored zero
lacks"""
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the column 0, 1, 2, ... of its eight lies


@dataclass(frozen=True, slots=True)
class Packing:
    method: Literal["gptq", "awq"]
    bits: int
    group_size: int
    """inputs of a group; -1: all"""
    zero_offset: int = 0
    """what a stored zero lacks: 1 in GPTQ's first format"""


def read_packing(config: dict[str, Any]) -> Packing | None:
    """What `quantization_config` of a config.json says; None without one. ModelError for what is not supported."""
    found = config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ModelError(f"quantization_config is {found!r:.80}; it must be an object")
    method = found.get("quant_method")
    if method not in tuple(WIDTHS):
        raise ModelError(f"quant_method is {method!r}; supported are 'gptq' and 'awq'")
    keys, layouts = _LAYOUTS[method]
    layout = next((str(found[key]).lower() for key in keys if found.get(key) is not None), next(iter(layouts)))
    bits, words = found.get("bits", found.get("w_bit")), found.get("pack_dtype", "int32")
    if bits not in WIDTHS[method] or layout not in layouts or words != "int32":
        raise ModelError(
            f"{method.upper()} in {bits!r} bits, {keys[0]} {layout!r}, in words of {words}, is not supported; "
            f"{', '.join(map(str, WIDTHS[method]))} bits are, {keys[0]} {' or '.join(map(repr, layouts))}, in int32"
        )
    group_size = found.get("group_size", found.get("q_group_size", 128))
    if type(group_size) is not int or (group_size < 1 and group_size != -1):
        raise ModelError(f"group_size is {group_size!r}; it must be a whole number above 0, or -1 for all inputs")
    return Packing(method, bits, group_size, layouts[layout])


def unpacked(tensors: Iterable[tuple[str, torch.Tensor]], packing: Packing) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors, with one dense `weight` [N, K] in float32 for the packed parts of each module."""
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        module, _, part = name.rpartition(".")
        if part in PARTS:
            modules.setdefault(module, {})[part] = tensor
        else:
            yield name, tensor
    for module in list(modules):
        yield f"{module}.weight", _dense(module, modules.pop(module), packing)


def packed(weights: Quantized, packing: Packing) -> dict[str, torch.Tensor]:
    """The parts of a module, by the end of their names. ValueError where its shape does not fill whole words."""
    numbers_NK, zeros_GN = weights.numbers_NK.numpy(), weights.zeros_GN.numpy().astype(np.uint8)
    parts = {"scales": weights.scales_GN.half().contiguous()}
    if packing.method == "awq":
        qweight, qzeros = _words(_awq_order(numbers_NK.T), packing.bits), _words(_awq_order(zeros_GN), packing.bits)
    else:
        stored_GN = (zeros_GN - np.uint8(packing.zero_offset)) & np.uint8((1 << packing.bits) - 1)
        qweight, qzeros = _words(numbers_NK, packing.bits).T, _words(stored_GN, packing.bits)
        parts["g_idx"] = weights.group_K.to(torch.int32)
    return parts | {
        "qweight": torch.from_numpy(np.ascontiguousarray(qweight)),
        "qzeros": torch.from_numpy(np.ascontiguousarray(qzeros)),
    }


def _awq_order(numbers_RX: np.ndarray) -> np.ndarray:
    if numbers_RX.shape[1] % 8:
        raise ValueError(f"{numbers_RX.shape[1]} outputs are not a multiple of 8")
    eights = numbers_RX.reshape(len(numbers_RX), -1, 8)
    return eights[:, :, np.argsort(_AWQ_ORDER)].reshape(numbers_RX.shape)


def _words(numbers_RX: np.ndarray, bits: int) -> np.ndarray:
    """[R, W] int32: the opposite of `_numbers`."""
    if numbers_RX.shape[1] * bits % 32:
        raise ValueError(f"{numbers_RX.shape[1]} numbers of {bits} bits do not fill words of 32")
    each = np.unpackbits(numbers_RX.astype(np.uint8)[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    return np.packbits(each.reshape(len(each), -1), axis=1, bitorder="little").view(np.int32)


def _dense(module: str, parts: dict[str, torch.Tensor], packing: Packing) -> torch.Tensor:
    for part in PARTS[:3]:
        if part not in parts:
            raise ModelError(f"{module}.{part} is missing beside {', '.join(sorted(parts))}")
    if not _belong_together(parts, packing):
        found = ", ".join(f"{part} {tuple(x.shape)} {x.dtype}".replace("torch.", "") for part, x in parts.items())
        raise ModelError(
            f"{module}: {found} do not belong together in {packing.bits} bits and groups of {packing.group_size}"
        )
    group_K = _groups(parts, packing)
    unpack = _gptq_numbers if packing.method == "gptq" else _awq_numbers
    numbers_NK, zeros_GN = unpack(parts["qweight"].numpy(), parts["qzeros"].numpy(), packing)
    scales_GN = parts["scales"].float().numpy()
    weight_NK = (numbers_NK - zeros_GN[group_K].T).astype(np.float32) * scales_GN[group_K].T
    return torch.from_numpy(weight_NK)


def _belong_together(parts: dict[str, torch.Tensor], packing: Packing) -> bool:
    words = [parts[part] for part in PARTS[:2]]
    if any(tensor.dtype != torch.int32 or tensor.ndim != 2 for tensor in words):
        return False
    features, outputs = _size(parts, packing)
    group_K = _groups(parts, packing)
    if group_K.shape != (features,) or group_K.dtype.kind != "i" or group_K.min() < 0:
        return False
    groups, width = int(group_K.max()) + 1, outputs * packing.bits // 32
    qweight = (features * packing.bits // 32, outputs) if packing.method == "gptq" else (features, width)
    shapes = [tuple(parts[part].shape) for part in PARTS[:3]]
    return shapes == [qweight, (groups, width), (groups, outputs)]


def _size(parts: dict[str, torch.Tensor], packing: Packing) -> tuple[int, int]:
    """Inputs and outputs."""
    rows, columns = parts["qweight"].shape
    if packing.method == "gptq":
        return rows * 32 // packing.bits, columns
    return rows, columns * 32 // packing.bits


def _groups(parts: dict[str, torch.Tensor], packing: Packing) -> np.ndarray:
    """[K]"""
    if "g_idx" in parts:
        return parts["g_idx"].numpy()
    features, _ = _size(parts, packing)
    return np.arange(features) // (features if packing.group_size == -1 else packing.group_size)


def _gptq_numbers(qweight_WN: np.ndarray, qzeros_GW: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray]:
    zeros_GN = (_numbers(qzeros_GW, packing.bits) + packing.zero_offset) % (1 << packing.bits)  # 0 was stored as -1
    return _numbers(qweight_WN.T, packing.bits), zeros_GN


def _awq_numbers(qweight_KW: np.ndarray, qzeros_GW: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray]:
    def in_order(words_RW: np.ndarray) -> np.ndarray:
        numbers = _numbers(words_RW, packing.bits)
        return numbers.reshape(len(numbers), -1, 8)[:, :, _AWQ_ORDER].reshape(numbers.shape)

    return in_order(qweight_KW).T, in_order(qzeros_GW)


def _numbers(words_RW: np.ndarray, bits: int) -> np.ndarray:
    """[R, W * 32 / bits] int16: each row's words as one stream of bits, lowest first."""
    stream = np.unpackbits(np.ascontiguousarray(words_RW).view(np.uint8), axis=1, bitorder="little")
    each = stream.reshape(len(stream), -1, bits)
    return np.packbits(each, axis=2, bitorder="little")[:, :, 0].astype(np.int16)
