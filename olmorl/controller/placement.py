"""Where the workers of a run go: how many, on which device, with how many cores. Pure: asks no cluster."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from olmorl.config.schema import Config, Device
from olmorl.contract.errors import PlacementError

CPUS_PER_GPU_WORKER = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    inference_workers: int
    learner_workers: int
    inference_device: Literal["cpu", "cuda"]
    learner_device: Literal["cpu", "cuda"]
    inference_threads: int | None
    learner_threads: int | None
    inference_gpu_share: float = 1.0
    learner_gpu_share: float = 1.0
    tensor_parallel: int = 1
    """devices of one inference worker: one bundle, so that they lie on one node"""

    @property
    def names(self) -> list[str]:
        engines = [f"inference-{i}" for i in range(self.inference_workers)]
        return engines + [f"learner-{i}" for i in range(self.learner_workers)]

    @property
    def bundles(self) -> list[dict[str, float]]:
        """One for each worker, inference first."""
        inference = _bundle(self.inference_device, self.tensor_parallel, self.inference_gpu_share)
        learner = _bundle(self.learner_device, 1, self.learner_gpu_share)
        return [
            *([inference] * self.inference_workers),
            *([learner] * self.learner_workers),
        ]

    @property
    def cpus(self) -> int:
        return sum(int(bundle["CPU"]) for bundle in self.bundles)

    @property
    def gpus(self) -> int:
        """Whole ones; workers that share one count as one."""
        return math.ceil(sum(bundle.get("GPU", 0) for bundle in self.bundles) - 1e-6)

    def describe(self) -> str:
        ranks = f"{self.tensor_parallel} " if self.tensor_parallel > 1 else ""
        return (
            f"{self.inference_workers} inference x {ranks}{self.inference_device}, "
            f"{self.learner_workers} learner x {self.learner_device}: {self.cpus} CPU, {self.gpus} GPU"
        )

    def check(self, resources: Mapping[str, float]) -> None:
        """Raises PlacementError, saying what is missing, if the cluster can never hold this placement."""
        for kind, wanted in (("GPU", self.gpus), ("CPU", self.cpus)):
            there = resources.get(kind, 0)
            if wanted > there:
                raise PlacementError(
                    f"this run needs {wanted} {kind}s ({self.describe()}) and the cluster has {there:g}: "
                    f"{wanted - there:g} missing. Lower inference.workers, inference.tensor_parallel or "
                    f"learner.workers, "
                    f"set their device to 'cpu', or add nodes"
                )


def plan_placement(config: Config, *, gpus_here: int | None = None) -> Placement:
    """Resolve `auto` devices and thread counts. `gpus_here`: GPUs of the cluster, None counts this machine's."""
    gpus = count_gpus() if gpus_here is None else gpus_here
    inference, learner = config.inference, config.learner
    inference_device = _device(inference.device, gpus)
    learner_device = _device(learner.device, gpus)
    ranks = inference.workers * inference.tensor_parallel
    on_cpu = sum(
        processes
        for processes, device in ((ranks, inference_device), (learner.workers, learner_device))
        if device == "cpu"
    )
    share = max(1, (os.cpu_count() or 1) // max(1, on_cpu))
    return Placement(
        inference_workers=inference.workers,
        learner_workers=learner.workers,
        inference_device=inference_device,
        learner_device=learner_device,
        inference_threads=inference.threads or (share if inference_device == "cpu" else None),
        learner_threads=learner.threads or (share if learner_device == "cpu" else None),
        inference_gpu_share=inference.gpu_share,
        learner_gpu_share=learner.gpu_share,
        tensor_parallel=inference.tensor_parallel,
    )


def _bundle(device: str, ranks: int, gpu_share: float) -> dict[str, float]:
    return {"CPU": CPUS_PER_GPU_WORKER * ranks, "GPU": ranks * gpu_share} if device == "cuda" else {"CPU": ranks}


def _device(wanted: Device, gpus: int) -> Literal["cpu", "cuda"]:
    if wanted == "auto":
        return "cuda" if gpus > 0 else "cpu"
    return wanted


def count_gpus() -> int:
    """NVIDIA GPUs of this machine, without torch: CUDA_VISIBLE_DEVICES narrows what the driver lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    folder = "/proc/driver/nvidia/gpus"
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0
