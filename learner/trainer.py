"""One learner rank put together: the model, its optimizer and what is done with them. No actor, no Ray.

Every method is collective over the ranks of the default process group.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from learner.agreement import patient_group
from learner.attention import DocumentLayout
from learner.checkpoint import CheckpointWriter, load_checkpoint
from learner.export import export_hugging_face
from learner.loader import load_sharded
from learner.loss import check_objective
from learner.model import DTYPES, PolicyModel, reshard
from learner.optim import build_optimizer
from learner.step import TrainState, train_step
from olmorl.contract.errors import ConfigError
from olmorl.contract.training import LearnerConfig, RankBatch, ScoreRequest, StepReport, check_learner_dtype

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
SCORED_TOKENS = 8192  # of one forward without gradients


def join_ranks(store: dist.Store, *, rank: int, world_size: int, device: torch.device) -> None:
    """Make the default process group over all learner ranks."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


class Trainer:
    """Wants the default process group to stand."""

    def __init__(self, config: LearnerConfig, *, device: torch.device) -> None:
        check_learner_dtype(config.dtype)
        check_objective(config)
        if config.compile:
            check_compiler(device)
        torch.manual_seed(config.seed)
        self.config = config
        self.device = device
        self.mesh = make_mesh(device, shard_size=config.shard_size)
        self._patient = patient_group()
        self.policy = self._load()
        reference = None
        if config.kl_beta > 0:
            reference = self._load().requires_grad_(False)
        self.state = TrainState(self.policy, build_optimizer(self.policy, config), reference)
        self._writer = CheckpointWriter()

    def _load(self) -> PolicyModel:
        return load_sharded(
            self.config.model,
            self.mesh,
            compute_dtype=DTYPES[self.config.dtype],
            chunk_tokens=self.config.logprob_chunk_tokens,
            activation_checkpointing=self.config.activation_checkpointing,
            compile=self.config.compile,
            patient=self._patient,
        )

    @property
    def version(self) -> int:
        return self.state.version

    def train_step(self, batch: RankBatch) -> StepReport:
        return train_step(self.state, batch, config=self.config, device=self.device)

    @torch.no_grad()
    def score(self, request: ScoreRequest) -> list[np.ndarray]:
        """Logprob of every token but the first, for each sequence."""
        logprobs: list[np.ndarray] = []
        for sequences in _within(request.sequences, SCORED_TOKENS):
            lengths = np.array([len(sequence) for sequence in sequences])
            starts = np.concatenate([[0], np.cumsum(lengths)])
            positions = np.concatenate([np.arange(n) for n in lengths])
            scored_R = torch.from_numpy(np.flatnonzero(positions)).to(self.device)
            logprobs_R, _ = self.policy(
                torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(self.device),
                torch.from_numpy(positions).to(self.device),
                DocumentLayout.from_starts(starts, device=self.device),
                scored_R=scored_R,
                context_R=scored_R - 1,
                temperature=request.temperature,
            )
            logprobs += np.split(logprobs_R.cpu().numpy(), np.cumsum(lengths - 1)[:-1])
        reshard(self.policy)
        return logprobs

    def save(self, path: str) -> None:
        """Begin a checkpoint; training may go on at once. Waits for the one before."""
        self._writer.begin(self.state, Path(path))

    def finish_save(self) -> None:
        """Wait for the checkpoint begun last. Needs no other rank, so it may run beside any other method."""
        self._writer.finish()

    def close(self) -> None:
        self._writer.close()

    def load(self, path: str) -> int:
        return load_checkpoint(self.state, Path(path))

    def export(self, path: str) -> None:
        export_hugging_face(
            self.policy, Path(path), source=self.config.model, dtype=self.config.wire_dtype, patient=self._patient
        )


def make_mesh(device: torch.device, *, shard_size: int | None) -> DeviceMesh:
    """One dimension to shard over; with `shard_size` a second one, before it, of replicas."""
    world_size = dist.get_world_size()
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if world_size % shard_size:
        raise ConfigError(f"learner.shard_size = {shard_size} does not divide the {world_size} learner ranks")
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def pick_device(name: str, *, rank: int) -> torch.device:
    """Ray shows each actor its own devices alone, so an index beyond them wraps to the first."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"the learner's device is {name!r}, but this process sees no CUDA device; use 'cpu'")
    return torch.device("cuda", rank % torch.cuda.device_count())


def check_compiler(device: torch.device) -> None:
    """ConfigError where torch.compile would find none: C++ for a CPU, C for what starts Triton's kernels on a GPU."""
    variable = "CXX" if device.type == "cpu" else "CC"
    usual = ("clang", "gcc") if variable == "CC" else ("clang++" if sys.platform == "darwin" else "g++",)
    names = (os.environ[variable],) if variable in os.environ else usual
    if not any(map(shutil.which, names)):
        raise ConfigError(
            f"learner.compile = true needs a compiler, and none of {', '.join(names)} is here; install one, name it in "
            f"the environment variable {variable}, or set learner.compile = false"
        )


def _within(sequences: Sequence[np.ndarray], limit: int) -> Iterator[list[np.ndarray]]:
    """Runs of sequences of at most `limit` tokens; a longer sequence stands alone."""
    run: list[np.ndarray] = []
    for sequence in sequences:
        assert len(sequence) >= 2, "a sequence to be scored has at least two tokens"
        if run and sum(map(len, run)) + len(sequence) > limit:
            yield run
            run = []
        run.append(sequence)
    if run:
        yield run
