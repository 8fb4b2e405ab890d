"""Where the workers of a run go: how many, on which device, with how many cores. Pure: asks no cluster."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from olmorl.config.schema import Config, Device
from olmorl.contract.errors import PlacementError

CPUS_PER_GPU_WORKER = 1
ACCELERATOR = "accelerator_type:"  # how Ray marks the nodes that have one: a resource of 1, however many there are
A_LITTLE = 0.001
GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each, from the driver
ROUNDING = 1e-6  # shares of a GPU are sums of fractions

Bundle = dict[str, float]
"""resources of one worker process, under Ray's names"""


@dataclass(frozen=True, slots=True)
class Node:
    """What a machine of the cluster has, in use or not."""

    name: str
    cpus: float
    gpus: float = 0
    gpu_type: str | None = None
    id: str = ""
    """in the cluster"""

    @classmethod
    def of(cls, name: str, resources: Mapping[str, float], *, id: str = "") -> "Node":
        """From resources under Ray's names."""
        types = [key.removeprefix(ACCELERATOR) for key in resources if key.startswith(ACCELERATOR)]
        return cls(name, resources.get("CPU", 0), resources.get("GPU", 0), types[0] if types else None, id)

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} {self.gpu_type or 'GPU'}" if self.gpus else ""
        return f"{self.name} ({self.cpus:g} CPU{gpus})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    inference_workers: int
    learner_workers: int
    shard_size: int
    """learner ranks that hold one copy of the model together"""
    inference_device: Literal["cpu", "cuda"]
    learner_device: Literal["cpu", "cuda"]
    inference_threads: int | None
    learner_threads: int | None
    inference_gpu_share: float = 1.0
    learner_gpu_share: float = 1.0
    inference_gpu_type: str | None = None
    learner_gpu_type: str | None = None
    tensor_parallel: int = 1
    """devices of one inference worker"""

    @property
    def shares_gpu(self) -> bool:
        """All workers lie on one GPU, and so on one node."""
        return self.inference_gpu_share < 1 and self.inference_device == self.learner_device == "cuda"

    @property
    def engine_bundles(self) -> list[Bundle]:
        """Of one engine: its ranks lie in one bundle, and so on one node."""
        device, kind = self.inference_device, self.inference_gpu_type
        return [_bundle(device, kind, ranks=self.tensor_parallel, gpu_share=self.inference_gpu_share)]

    @property
    def learner_bundles(self) -> list[list[Bundle]]:
        """Of each shard group of learners; the closer one lies together, the better."""
        groups = self.learner_workers // self.shard_size
        bundle = _bundle(self.learner_device, self.learner_gpu_type, ranks=1, gpu_share=self.learner_gpu_share)
        return [[bundle] * self.shard_size for _ in range(groups)]

    @property
    def cpus(self) -> int:
        return int(self._total("CPU"))

    @property
    def gpus(self) -> int:
        """Whole ones; workers that share one count as one."""
        return math.ceil(self._total("GPU") - ROUNDING)

    def describe(self) -> str:
        ranks = f"{self.tensor_parallel} " if self.tensor_parallel > 1 else ""
        engines = ranks + (self.inference_gpu_type or self.inference_device)
        learners = self.learner_gpu_type or self.learner_device
        return (
            f"{self.inference_workers} inference x {engines}, "
            f"{self.learner_workers} learner x {learners}: {self.cpus} CPU, {self.gpus} GPU"
        )

    def check(self, nodes: Sequence[Node]) -> None:
        """Raises PlacementError if these nodes, all idle, cannot hold it: what is missing, and the nearest that fits.

        So that nothing waits for room that can never be.
        """
        if self._fits(nodes):
            return
        have = {"GPU": sum(node.gpus for node in nodes), "CPU": sum(node.cpus for node in nodes)}
        missing = [
            f"{wanted} {kind}s ({self.describe()}) and the cluster has {have[kind]:g}: {wanted - have[kind]:g} missing"
            for kind, wanted in (("GPU", self.gpus), ("CPU", self.cpus))
            if wanted > have[kind]
        ]
        needs = missing[0] if missing else f"{self.describe()}, and no node has the pieces together"
        raise PlacementError(f"this run needs {needs}. Nodes: {_described(nodes)}. {self._mend(nodes)}")

    def _mend(self, nodes: Sequence[Node]) -> str:
        nearest = self._nearest(nodes)
        if nearest is not None:
            return (
                f"Add nodes, or take the nearest that fits: inference.workers = {nearest.inference_workers}, "
                f"learner.workers = {nearest.learner_workers}"
            )
        if self.gpus and not any(node.gpus for node in nodes):
            on_cpu = replace(self, inference_device="cpu", learner_device="cpu")._nearest(nodes)
            return "Add nodes" + (", or set inference.device and learner.device to 'cpu'" if on_cpu else " with GPUs")
        if self.tensor_parallel > 1:
            return "Add nodes, or lower inference.tensor_parallel: a run with fewer workers does not fit either"
        if self.shard_size > 1:
            key = "learner.workers" if self.shard_size == self.learner_workers else "learner.shard_size"
            return (
                f"Add nodes, or lower {key}: no smaller run fits while {self.shard_size} learners hold a copy of the "
                "model together"
            )
        return "Add nodes: no smaller run fits either"

    def _bundles(self) -> list[Bundle]:
        """Of all workers."""
        learners = [bundle for group in self.learner_bundles for bundle in group]
        return self.engine_bundles * self.inference_workers + learners

    def _total(self, kind: str) -> float:
        return sum(bundle.get(kind, 0) for bundle in self._bundles())

    def _fits(self, nodes: Sequence[Node]) -> bool:
        """Groups that need one node go first, and workers without a GPU where they take none away."""
        free = [_resources(node) for node in sorted(nodes, key=lambda node: node.gpus)]
        groups = [self._bundles()] if self.shares_gpu else [[bundle] for bundle in self._bundles()]
        groups.sort(key=lambda group: (-sum(b.get("GPU", 0) for b in group), -len(group[0])))
        return all(_take(group, free) for group in groups)

    def _nearest(self, nodes: Sequence[Node]) -> "Placement | None":
        return next((plan for plan in self._smaller() if plan._fits(nodes)), None)

    def _smaller(self) -> Iterator["Placement"]:
        """Fewer engines first, then fewer learners."""
        for learners in range(self.learner_workers, min(self.learner_workers, 1) - 1, -self.shard_size):
            for engines in range(self.inference_workers, 0, -1):
                yield replace(self, inference_workers=engines, learner_workers=learners)


def _described(nodes: Sequence[Node]) -> str:
    """Nodes that are alike once, with their number and the first one's name."""
    alike: dict[tuple[float, float, str | None], list[Node]] = {}
    for node in nodes:
        alike.setdefault((node.cpus, node.gpus, node.gpu_type), []).append(node)
    return (
        "; ".join(f"{len(kind)} like {kind[0]}" if len(kind) > 1 else f"{kind[0]}" for kind in alike.values()) or "none"
    )


def _bundle(device: str, gpu_type: str | None, *, ranks: int, gpu_share: float) -> Bundle:
    if device == "cpu":
        return {"CPU": ranks}
    kind = {} if gpu_type is None else {ACCELERATOR + gpu_type: A_LITTLE}
    return {"CPU": CPUS_PER_GPU_WORKER * ranks, "GPU": ranks * gpu_share, **kind}


def _resources(node: Node) -> Bundle:
    kind = {} if node.gpu_type is None else {ACCELERATOR + node.gpu_type: 1.0}
    return {"CPU": node.cpus, "GPU": node.gpus, **kind}


def _take(group: list[Bundle], free: list[Bundle]) -> bool:
    """Take the group out of the first node that has room for it."""
    kinds = {kind for bundle in group for kind in bundle}
    need = {kind: sum(bundle.get(kind, 0) for bundle in group) for kind in kinds}
    for node in free:
        if all(node.get(kind, 0) >= need[kind] - ROUNDING for kind in need):
            for kind in need:
                node[kind] -= need[kind]
            return True
    return False


def plan_placement(config: Config, nodes: Sequence[Node] | None = None) -> Placement:
    """Resolve `auto` devices and thread counts. `nodes` of the cluster; None is this machine alone."""
    nodes = [this_machine()] if nodes is None else nodes
    gpus = sum(node.gpus for node in nodes)
    inference, learner = config.inference, config.learner
    inference_device = _device(inference.device, gpus)
    learner_device = _device(learner.device, gpus)
    ranks = inference.workers * inference.tensor_parallel
    on_cpu = sum(
        processes
        for processes, device in ((ranks, inference_device), (learner.workers, learner_device))
        if device == "cpu"
    )
    share = max(1, int(sum(node.cpus for node in nodes)) // max(1, on_cpu))
    return Placement(
        inference_workers=inference.workers,
        learner_workers=learner.workers,
        shard_size=learner.shard_size or learner.workers,
        inference_device=inference_device,
        learner_device=learner_device,
        inference_threads=inference.threads or (share if inference_device == "cpu" else None),
        learner_threads=learner.threads or (share if learner_device == "cpu" else None),
        inference_gpu_share=inference.gpu_share,
        learner_gpu_share=learner.gpu_share,
        inference_gpu_type=inference.gpu_type,
        learner_gpu_type=learner.gpu_type,
        tensor_parallel=inference.tensor_parallel,
    )


def gpu_types(nodes: Sequence[Node]) -> list[str]:
    return sorted({node.gpu_type or "unnamed" for node in nodes if node.gpus})


def this_machine(*, cpus: int = 0) -> Node:
    """`cpus`: at least so many, for a cluster of our own may declare more than there are."""
    gpus = count_gpus()
    return Node("this machine", max(os.cpu_count() or 1, cpus), gpus, _gpu_type() if gpus else None)


def _device(wanted: Device, gpus: float) -> Literal["cpu", "cuda"]:
    if wanted == "auto":
        return "cuda" if gpus > 0 else "cpu"
    return wanted


def count_gpus() -> int:
    """NVIDIA GPUs of this machine, without torch: CUDA_VISIBLE_DEVICES narrows what the driver lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    return len(list(GPUS.iterdir())) if GPUS.is_dir() else 0


def _gpu_type() -> str | None:
    """By the name that Ray would have for it."""
    for file in GPUS.glob("*/information"):
        if (
            match := re.search(r"^Model:\s+\w+\s+(?:Tesla\s+)?([A-Z0-9]+)", file.read_text(), re.MULTILINE)
        ) is not None:
            return match[1]
    return None
