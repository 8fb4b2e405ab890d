"""What the ranks of a tensor-parallel group say to each other while they compute one step together.

Rank 0, the leader, decides and samples; the others follow. A collective that breaks, because a rank died, raises
WorkerError: the group is of no use any more.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from olmorl.contract.errors import WorkerError

TIMEOUT = timedelta(seconds=120)  # of one collective, into which all ranks step together


class TensorParallel:
    """One rank's side. Without a group it is alone, and every call gives its argument back."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group  # a bare backend, whose classes carry no types

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Over ranks, in place, the same on all."""
        if self.size > 1:
            self._wait(lambda: self._group.allreduce([x]))
        return x

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(x) / self.size if self.size > 1 else x

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """What `source` has, in place of what the others have. `x` must be contiguous."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = source
            self._wait(lambda: self._group.broadcast([x], options))
        return x

    def gather_columns(self, part_RV: torch.Tensor, num_columns: int) -> torch.Tensor:
        """On the leader the parts of all ranks side by side, `num_columns` in all; on a follower its own part.

        Every rank has as many columns as rank 0, but for the last, which may have fewer.
        """
        if self.size == 1:
            return part_RV
        width = -(-num_columns // self.size)
        padded_RV = F.pad(part_RV, (0, width - part_RV.shape[1])).contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(padded_RV) for _ in range(self.size)] if self.rank == 0 else []
        self._wait(lambda: self._group.gather([parts] if parts else [], [padded_RV], options))
        return torch.cat(parts, 1)[:, :num_columns] if parts else part_RV

    def abort(self) -> None:
        """Ends a collective that hangs in another thread."""
        self._group.abort()

    def _wait(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise WorkerError(f"rank {self.rank} of {self.size} lost its tensor-parallel group: {error}") from error


ALONE = TensorParallel()


def join_group(rank: int, size: int, store: dist.Store, device: torch.device) -> TensorParallel:
    """Returns when all ranks are there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = TIMEOUT
        return TensorParallel(rank, size, dist.ProcessGroupNCCL(store, rank, size, nccl_options))
    gloo: Any = dist.ProcessGroupGloo  # its stub knows neither its options nor their constructor
    options = gloo._Options()
    options._timeout = TIMEOUT
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # a group lives on one machine
    return TensorParallel(rank, size, gloo(store, rank, size, options))
