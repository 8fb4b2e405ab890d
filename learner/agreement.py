"""Ranks that fail together: what one of them could not do, no other goes on from, or waits for."""

from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(days=1)  # how long a disk may take is for the driver to say


def patient_group() -> dist.ProcessGroup:
    """All ranks, in a group where they may wait for one that reads or writes a model. Collective."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def raise_together(error: Exception | None, *, group: dist.ProcessGroup | None = None) -> None:
    """On every rank the first error that any rank has. Collective, so it is a barrier too."""
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=group)
    for one in (error, *errors):
        if one is not None:
            raise one
