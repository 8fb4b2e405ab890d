"""Checkpoints that another number of ranks can resume, and the export to a Hugging Face folder.

A checkpoint is written while training goes on: `begin` copies the state to host memory, a thread writes the copy. The
driver marks the folder complete after `finish` on every rank. An export appears under its name only when it is whole.
"""

import pickle
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict, snapshot_download
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from learner.model import DTYPES, PolicyModel, full_tensor
from learner.step import TrainState
from olmorl.contract.errors import WorkerError
from olmorl.file_mode import open_to_readers

EXPORT_SHARD_BYTES = 5 * 10**9
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


class CheckpointWriter:
    """Writes one checkpoint at a time, with a process group of its own, so that its collectives meet no other."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._writing: Future[Any] | None = None
        self._path = Path()

    def begin(self, state: TrainState, path: Path) -> None:
        """Copy weights, optimizer, version, counters and random state; collective. The copy costs host memory of
        three times this rank's share of the float32 weights."""
        self.finish()
        writing = dcp.async_save(
            _state_dict(state),
            storage_writer=dcp.FileSystemWriter(path, overwrite=True),
            process_group=self._group,
            async_stager=self._stager,
        )
        assert isinstance(writing, Future), "this stager copies before it returns"
        self._writing, self._path = writing, path

    def finish(self) -> None:
        """Wait until the checkpoint begun last is on disk; raises what kept it from getting there."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                writing.result()
            except (CheckpointException, OSError, RuntimeError) as error:
                raise WorkerError(f"the checkpoint {self._path} was not written: {_last_line(error)}") from None

    def close(self) -> None:
        self.finish()
        self._stager.close()


def load_checkpoint(state: TrainState, path: Path) -> int:
    """Restore `state` in place from a checkpoint of any number of ranks; returns its version. Collective."""
    if not (path / ".metadata").is_file():
        raise WorkerError(f"{path} is not a whole learner checkpoint: it has no .metadata")
    restored = _state_dict(state)
    try:
        dcp.load(restored, checkpoint_id=path)
    except (CheckpointException, OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise WorkerError(
            f"{path} cannot be read, or is of another model ({type(error).__name__}: {_last_line(error):.300}); "
            "move it away, and --resume continues the checkpoint before it"
        ) from None
    settings = [dict(group) for group in state.optimizer.param_groups]
    set_state_dict(
        state.policy, state.optimizer, model_state_dict=restored["model"], optim_state_dict=restored["optimizer"]
    )
    for group, ours in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(ours)  # as the config of this run has them, not the one that saved
    progress = restored["progress"]
    state.version = int(progress["version"])
    state.skipped_steps = int(progress["skipped_steps"])
    state.skipped_in_a_row = int(progress["skipped_in_a_row"])
    torch.set_rng_state(progress["random_state"])
    return state.version


def _last_line(error: BaseException) -> str:
    """What went wrong; before it torch puts a traceback."""
    return (str(error).strip().splitlines() or [""])[-1]


def _state_dict(state: TrainState) -> dict[str, Any]:
    never_stepped = not state.optimizer.state
    model, optimizer = get_state_dict(state.policy, state.optimizer)
    if never_stepped:  # to have something to save, torch made a step of no gradients, which must not count
        for slots in state.optimizer.state.values():
            slots["step"].zero_()
    progress = {
        "version": torch.tensor(state.version),
        "skipped_steps": torch.tensor(state.skipped_steps),
        "skipped_in_a_row": torch.tensor(state.skipped_in_a_row),
        "random_state": torch.get_rng_state(),
    }
    return {"model": model, "optimizer": optimizer, "progress": progress}


def export_hugging_face(
    policy: PolicyModel, path: Path, *, source: str, dtype: str, max_shard_bytes: int = EXPORT_SHARD_BYTES
) -> None:
    """Write a folder that transformers loads: safetensors, config, and the tokenizer's files of `source`. Collective.

    Rank 0 writes; it needs room for the whole model in `dtype`.
    """
    persistent = policy.causal_lm.state_dict()
    kept = {name: buffer.cpu() for name, buffer in policy.causal_lm.named_buffers() if name in persistent}
    tensors = kept if dist.get_rank() == 0 else {}
    for name, parameter in policy.hugging_face_parameters().items():
        tensor = full_tensor(parameter, dtype=DTYPES[dtype])
        if dist.get_rank() == 0:
            tensors[name] = tensor.to("cpu", copy=True)  # a gathered tensor may be part of a larger storage
    if dist.get_rank() == 0:
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_torch_state_dict(tensors, partial, max_shard_size=max_shard_bytes)
        for shard in partial.glob("*.safetensors"):
            open_to_readers(shard)
        config = type(policy.config).from_dict(policy.config.to_dict())
        config.dtype = dtype
        config.architectures = [type(policy.causal_lm).__name__]
        config.save_pretrained(partial)
        if policy.causal_lm.generation_config is not None:  # which the source's own file replaces
            policy.causal_lm.generation_config.save_pretrained(partial)
        _copy_companions(source, partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    dist.barrier()


def _copy_companions(source: str, target: Path) -> None:
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=list(COPIED_FILES)))
    for pattern in COPIED_FILES:
        for file in folder.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target / file.name)
