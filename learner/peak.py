"""What a learner's device could do at most."""

from functools import partial

import torch

from olmorl.contract.peaks import DevicePeak, gpu_peak, measured_peak


def device_peak(device: torch.device) -> DevicePeak:
    if device.type == "cpu":
        return measured_peak(torch.ones, threads=torch.get_num_threads())
    return gpu_peak(
        torch.cuda.get_device_name(device),
        partial(torch.ones, device=device, dtype=torch.bfloat16),
        synchronize=partial(torch.cuda.synchronize, device),
    )
