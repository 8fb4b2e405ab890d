"""From a Hugging Face folder (or hub id) to a decoder with its weights, and the ids that end a text."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from inference.model.architecture import read_architecture, read_json
from inference.model.decoder import Decoder
from inference.model.tensor_parallel import ALONE, TensorParallel
from inference.quantization.packed import read_packing, unpacked
from olmorl.contract.errors import ModelError
from olmorl.contract.generation import Kernels, KvCacheDtype, Quantization

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Not parameters: buffers that old checkpoints carry, and the copy of a tied head.
_IGNORED = ("rotary_emb.inv_freq",)


def resolve_folder(model: str) -> Path:
    """A local folder as it is; anything else is a hub id and downloaded."""
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):  # unlike Path.is_dir no error for a name that is too long
        return folder
    if os.path.exists(folder) or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"model {model!r} is not a folder; give a Hugging Face folder or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except (OSError, ValueError) as error:
        raise ModelError(f"model {model!r} is neither a folder here nor to be had from the hub: {error}") from None


def load_decoder(
    folder: Path,
    *,
    dtype: str,
    device: str,
    max_model_len: int | None,
    kernels: Kernels = "auto",
    ranks: TensorParallel = ALONE,
    quantization: Quantization | None = None,
    quantize_head: bool = False,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> Decoder:
    arch = read_architecture(folder)
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    length = arch.max_positions if max_model_len is None else max_model_len
    if length > arch.reach:
        log.warning(
            "max_model_len is %d, but %s was made for %d positions: what it says beyond them may be worthless",
            length,
            folder,
            arch.reach,
        )
    decoder = Decoder(
        arch,
        dtype=DTYPES[dtype],
        device=torch.device(device),
        max_model_len=length,
        kernels=kernels,
        ranks=ranks,
        quantization=quantization,
        quantize_head=quantize_head,
        kv_dtype=torch.int8 if kv_cache_dtype == "int8" else None,
    )
    shapes = {spec.name: spec.shape for spec in decoder.specs}
    missing = set(shapes)
    for name, tensor in dense_tensors(folder):
        if name.endswith(_IGNORED) or (name == "lm_head.weight" and arch.tied):
            continue
        if name not in shapes and name.endswith(".bias") and not tensor.any():
            continue  # GPTQ is written with one everywhere
        if name not in shapes:
            raise ModelError(f"{folder}: tensor {name!r} is not part of this architecture")
        if shapes[name] != tuple(tensor.shape):
            raise ModelError(f"{folder}: {name!r} has shape {tuple(tensor.shape)}; expected {shapes[name]}")
        decoder.load(name, tensor)
        missing.discard(name)
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, among them {min(missing)!r}")
    return decoder


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """From generation_config.json, without it from config.json. Nothing else in them changes sampling."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (found,)
    return ()


def dense_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a Hugging Face folder, one by one; GPTQ's and AWQ's as the dense ones they stand for. Raises
    ModelError."""
    config = folder / "config.json"  # a folder of new weights alone has none
    try:
        packing = read_packing(read_json(config)) if config.exists() else None
        stored = _stored_tensors(folder)
        yield from stored if packing is None else unpacked(stored, packing)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def _stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not readable as safetensors: {error}") from None


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelError(f"{index} has no weight_map from tensors to files")
        return [folder / name for name in sorted(set(shards.values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ModelError(f"{folder} holds no model.safetensors (nor model.safetensors.index.json)")
