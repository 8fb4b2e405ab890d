"""Checkpoints that another number of ranks can resume.

A checkpoint is written while training goes on: `begin` copies the state to host memory, a thread writes the copy. The
driver marks the folder complete after `finish` on every rank.
"""

import pickle
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from learner.step import TrainState
from olmorl.contract.errors import WorkerError


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
