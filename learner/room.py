"""What is said where a disk has no room, or does not take what is written for another reason."""

import shutil
from pathlib import Path

from olmorl.contract.errors import WorkerError


def not_written(what: str, error: BaseException, *, folder: Path, num_bytes: int) -> WorkerError:
    """`what` of `num_bytes` was to go into `folder`, which need not be there; call it when what was left is removed."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    wanted, free = num_bytes / 1e6, shutil.disk_usage(there).free / 1e6
    return WorkerError(f"{what} was not written: {error}; it takes {wanted:,.1f} MB, {there} has {free:,.1f} MB free")
