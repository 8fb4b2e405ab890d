"""What the engine's device could do at most; on a CPU the engine's own product counts too, for it may be the faster."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from olmorl.contract.peaks import DevicePeak, gpu_peak, measured_peak


def device_peak(device: torch.device) -> DevicePeak:
    if device.type == "cpu":
        return measured_peak(torch.ones, threads=torch.get_num_threads(), products=[_compiled_product])
    return gpu_peak(
        torch.cuda.get_device_name(device),
        partial(torch.ones, device=device, dtype=torch.bfloat16),
        synchronize=partial(torch.cuda.synchronize, device),
    )


def _compiled_product(matrix: torch.Tensor) -> Callable[[], object]:
    from inference.kernels import cpu_decoder
    from inference.kernels.cpu_team import Team, new_signals
    from inference.kernels.cpu_tile import LANES
    from inference.model.compiled_decoder import quantized_scratch

    size, team = len(matrix), Team(torch.get_num_threads())
    panels = np.empty((size // LANES, size, LANES), np.float32)
    out = np.empty((size, size), np.float32)
    floats, unused = (matrix.numpy(), 0, matrix.data_ptr(), size), quantized_scratch(0, 0)
    return lambda: team.run(cpu_decoder.head, new_signals(team.threads), *floats, panels, *unused, out)
