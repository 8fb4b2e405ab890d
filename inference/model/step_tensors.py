"""A step's arrays as tensors on the device, moved once a step and without waiting for the device.

Suffixes as in `inference.step_batch`.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from inference.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class StepTensors:
    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    rows_T: torch.Tensor  # int64
    slots_T: torch.Tensor  # int64
    block_table_RW: torch.Tensor  # int32


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array's own memory on a CPU; elsewhere a copy that is under way, whatever happens to the array."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def tensors_of(batch: StepBatch, device: torch.device) -> StepTensors:
    if batch.tensors is not None:
        return batch.tensors
    arrays = (batch.token_ids_T, batch.positions_T, batch.rows_T, batch.slots_T, batch.block_table_RW)
    return StepTensors(*(on_device(array, device) for array in arrays))


def moved(batch: StepBatch, device: torch.device) -> StepBatch:
    """The batch with its tensors on the device."""
    windowed = batch.windowed
    if windowed is not None:
        windowed = replace(windowed, tensors=tensors_of(windowed, device))
    return replace(batch, tensors=tensors_of(batch, device), windowed=windowed)
