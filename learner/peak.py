"""What a learner's device could do at most."""

from functools import partial

import torch

from olmorl.contract.peaks import DevicePeak, measured_peak, vendor_peak


def device_peak(device: torch.device) -> DevicePeak:
    if device.type == "cpu":
        return measured_peak(torch.ones, threads=torch.get_num_threads())
    return vendor_peak(torch.cuda.get_device_name(device)) or measured_peak(
        partial(torch.ones, device=device), synchronize=partial(torch.cuda.synchronize, device)
    )
