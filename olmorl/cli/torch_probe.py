"""Run by doctor as a process of its own: does torch import, which devices has it, does its gloo backend work?

The only module of olmorl that imports torch; nothing imports it. Prints findings as JSON on its last line.
"""

import json
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    print(json.dumps([probe_devices(), probe_gloo()]))


def probe_devices() -> dict[str, str]:
    version = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return {"status": "ok", "what": f"{version}, devices: {names}"}
    if torch.version.cuda is None:
        return {"status": "ok", "what": f"{version}, CPU build; everything runs on the CPU"}
    return {
        "status": "warn",
        "what": f"{version} is a CUDA {torch.version.cuda} build, but no GPU is usable; everything runs on the CPU",
        "fix": "if there is a GPU, see that nvidia-smi lists it and that its driver is new enough for this CUDA",
    }


def probe_gloo() -> dict[str, str]:
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
        value = torch.ones(1)
        dist.all_reduce(value)
        dist.destroy_process_group()
    except RuntimeError as error:
        return {
            "status": "fail",
            "what": f"gloo does not work: {error}",
            "fix": "see that this host's name resolves; GLOO_SOCKET_IFNAME=lo picks the network interface",
        }
    return {"status": "ok", "what": "gloo: a process group of one works"}


if __name__ == "__main__":
    main()
