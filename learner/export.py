"""The policy as a Hugging Face folder, which appears under its name only when it is whole.

Names are those of the family's checkpoints on the hub, where each expert has tensors of its own; transformers, in whose
memory they are fused, takes them apart as its own `save_pretrained` does.
"""

import re
import shutil
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from learner.agreement import raise_together
from learner.model import DTYPES, PolicyModel, full_tensor
from learner.room import not_written
from olmorl.file_mode import open_to_readers

SHARD_BYTES = 5 * 10**9
COPIED_FILES = (  # of the model folder, as they are
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)
_LAYER = re.compile(r"\.\d+\.")


def export_hugging_face(
    policy: PolicyModel,
    path: Path,
    *,
    source: str,
    dtype: str,
    max_shard_bytes: int = SHARD_BYTES,
    patient: dist.ProcessGroup | None = None,
) -> None:
    """Write a folder that transformers and vLLM load: safetensors, config, and the tokenizer's files of `source`.

    Collective. Rank 0 writes; it needs room for the whole model in `dtype`, and the others wait in `patient` for as
    long as it takes. A WorkerError on all ranks if it cannot be written; then nothing of it is left.
    """
    tensors = _gather(policy, dtype=DTYPES[dtype])
    error = None
    if dist.get_rank() == 0:
        partial, old = (path.with_name(path.name + suffix) for suffix in (".partial", ".old"))
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        try:
            for left in (partial, old):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            _write(policy.causal_lm, tensors, partial, source=source, dtype=dtype, max_shard_bytes=max_shard_bytes)
            if path.exists():
                path.rename(old)
            partial.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError) as caught:
            shutil.rmtree(partial, ignore_errors=True)
            error = not_written(f"the export {path}", caught, folder=path.parent, num_bytes=num_bytes)
    raise_together(error, group=patient)


def _gather(policy: PolicyModel, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """On rank 0, in host memory: parameters in `dtype`, and the buffers that a checkpoint holds. Collective."""
    persistent = policy.causal_lm.state_dict()
    tensors = {name: buffer.cpu() for name, buffer in policy.causal_lm.named_buffers() if name in persistent}
    for name, parameter in policy.hugging_face_parameters().items():
        tensor = full_tensor(parameter, dtype=dtype)
        if dist.get_rank() == 0:
            tensors[name] = tensor.to("cpu", copy=True)  # a gathered tensor may be part of a larger storage
    return tensors if dist.get_rank() == 0 else {}


def _write(
    model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path, *, source: str, dtype: str, max_shard_bytes: int
) -> None:
    save_torch_state_dict(_as_on_the_hub(model, tensors), folder, max_shard_size=max_shard_bytes)
    for shard in folder.glob("*.safetensors"):
        open_to_readers(shard)
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:  # which the source's own file replaces
        model.generation_config.save_pretrained(folder)
    _copy_companions(source, folder)


def _as_on_the_hub(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, emptied on the way: layer by layer, so that only one layer's stand twice in memory."""
    renamed: dict[str, Tensor] = {}
    for _, names in groupby(sorted(tensors, key=_layer), key=_layer):
        of_layer = revert_weight_conversion(model, {name: tensors.pop(name) for name in names})
        # A part that is still a view keeps the whole in memory, and counts as the whole where files are divided.
        renamed |= {name: tensor.clone() if _is_view(tensor) else tensor for name, tensor in of_layer.items()}
    return renamed


def _layer(name: str) -> str:
    found = _LAYER.search(name)
    return name[: found.end()] if found else ""


def _is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def _copy_companions(source: str, target: Path) -> None:
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=list(COPIED_FILES)))
    for pattern in COPIED_FILES:
        for file in folder.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target / file.name)
