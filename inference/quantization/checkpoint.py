"""A GPTQ or AWQ checkpoint on disk, as other programs read them too."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from inference.model.architecture import Architecture, read_json
from inference.model.decoder import Decoder
from inference.model.load import DTYPES
from inference.quantization.gptq import DAMPING
from inference.quantization.grid import Grid, Quantized
from inference.quantization.packed import WIDTHS, Packing, packed
from olmorl.contract.errors import ConfigError
from olmorl.file_mode import open_to_readers

_COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "*.jinja", "vocab.*", "merges.txt")


def packing_of(method: Literal["gptq", "awq"], grid: Grid) -> Packing:
    """Raises ConfigError for a width that the format has no words for."""
    if grid.bits not in WIDTHS[method]:
        raise ConfigError(
            f"{method.upper()} checkpoints have {', '.join(map(str, WIDTHS[method]))} bits; {grid.bits} is not among "
            "them"
        )
    return Packing(method, grid.bits, grid.group_size, zero_offset=1 if method == "gptq" else 0)


def largest_group(arch: Architecture) -> int:
    """Of the usual sizes of a group, the largest that fills all matrices with whole groups."""
    return next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if not any(other % size for other in _inputs(arch)))


def check_shapes(arch: Architecture, packing: Packing) -> None:
    """Raises ConfigError where matrices do not fill whole groups and words, which other readers insist on."""
    for size in sorted(_inputs(arch)):
        if size % packing.group_size:
            raise ConfigError(
                f"group_size is {packing.group_size}, which does not divide the {size} inputs of some matrices; take "
                f"{largest_group(arch)} or a divisor of it"
            )
    step = 8 if packing.method == "awq" else 32
    for size in sorted(_inputs(arch) | {arch.num_kv_heads * arch.head_dim}):
        if size % step:
            raise ConfigError(f"some matrices have {size} rows or columns, which is not a multiple of {step}")


def _inputs(arch: Architecture) -> set[int]:
    return {arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim}


def stored_dtype(folder: Path) -> torch.dtype:
    """Of what is not quantised."""
    config = read_json(folder / "config.json")
    return DTYPES.get(config.get("dtype") or config.get("torch_dtype") or "", torch.float32)


def write_checkpoint(
    folder: Path, source: Path, decoder: Decoder, modules: Mapping[str, Quantized], packing: Packing, *, desc_act: bool
) -> int:
    """`decoder` as `quantize_layers` left it. The bytes of the weights."""
    config = read_json(source / "config.json")
    dtype = stored_dtype(source)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in decoder.tensors.items():
        module = name.removesuffix(".weight")
        if module in modules:
            tensors |= {f"{module}.{part}": value for part, value in packed(modules[module], packing).items()}
        else:
            tensors[name] = tensor.to(dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for path in source.glob(pattern):
            shutil.copy(path, folder)
    config["quantization_config"] = _quantization_config(packing, desc_act)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    open_to_readers(folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def _quantization_config(packing: Packing, desc_act: bool) -> dict[str, Any]:
    common = {"quant_method": packing.method, "bits": packing.bits, "group_size": packing.group_size}
    if packing.method == "awq":
        return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    return common | {
        "desc_act": desc_act,
        "sym": True,
        "damp_percent": DAMPING,
        "checkpoint_format": "gptq",
        "true_sequential": True,
        "static_groups": False,
        "lm_head": False,
    }
