"""The batch of a step that was not finite, kept as a file, so that the step can be looked at and repeated.

A .npz that numpy opens anywhere; entry "2/0/token_ids" is that field of micro-batch 0 of mini-batch 2.
"""

from dataclasses import fields
from pathlib import Path

import numpy as np

from olmorl.contract.training import MicroBatch, MiniBatch, RankBatch

_FIELDS = tuple(field.name for field in fields(MicroBatch))


def save_batch(batch: RankBatch, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "version": np.array(batch.version),
        "num_loss_tokens": np.array([mini.num_loss_tokens for mini in batch.mini_batches]),
        "num_micro_batches": np.array([len(mini.micro_batches) for mini in batch.mini_batches]),
    }
    for i, mini in enumerate(batch.mini_batches):
        for j, micro in enumerate(mini.micro_batches):
            arrays |= {f"{i}/{j}/{name}": getattr(micro, name) for name in _FIELDS}
    np.savez_compressed(path, allow_pickle=False, **arrays)


def load_batch(path: Path) -> RankBatch:
    with np.load(path) as file:
        mini_batches = []
        for i, count in enumerate(file["num_micro_batches"].tolist()):
            micro_batches = tuple(
                MicroBatch(**{name: file[f"{i}/{j}/{name}"] for name in _FIELDS}) for j in range(count)
            )
            num_loss_tokens = int(file["num_loss_tokens"][i])
            mini_batches.append(MiniBatch(micro_batches=micro_batches, num_loss_tokens=num_loss_tokens))
        return RankBatch(version=int(file["version"]), mini_batches=tuple(mini_batches))
