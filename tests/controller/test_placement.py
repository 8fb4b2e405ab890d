import os
from collections.abc import Callable

import pytest

from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, PlacementError
from olmorl.controller.cluster import check_placement
from olmorl.controller.compose import sync_transport
from olmorl.controller.placement import count_gpus, plan_placement

MakeConfig = Callable[..., Config]


def test_auto_takes_gpus_where_there_are_some(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("inference.workers=2"), gpus_here=3)
    assert (placement.inference_device, placement.learner_device) == ("cuda", "cuda")
    assert (placement.cpus, placement.gpus) == (3, 3)
    assert placement.inference_threads is None
    assert plan_placement(quickstart_config(), gpus_here=0).inference_device == "cpu"


def test_a_device_that_is_named_is_taken(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("learner.device=cpu"), gpus_here=2)
    assert placement.bundles == [{"CPU": 1, "GPU": 1}, {"CPU": 1}]
    assert placement.names == ["inference-0", "learner-0"]


def test_one_gpu_may_hold_both_roles(quickstart_config: MakeConfig) -> None:
    config = quickstart_config("inference.gpu_share=0.4", "learner.gpu_share=0.6")
    placement = plan_placement(config, gpus_here=1)
    assert placement.bundles == [{"CPU": 1, "GPU": 0.4}, {"CPU": 1, "GPU": 0.6}] and placement.gpus == 1
    placement.check({"CPU": 2, "GPU": 1})
    assert sync_transport(config, placement) == "ipc"
    apart = quickstart_config()
    assert sync_transport(apart, plan_placement(apart, gpus_here=2)) == "nccl"
    assert sync_transport(config, plan_placement(config, gpus_here=0)) == "gloo"
    mapped = quickstart_config("sync.transport=ipc")
    assert sync_transport(mapped, plan_placement(mapped, gpus_here=0)) == "ipc"
    with pytest.raises(ConfigError, match="the learner is on cuda, each with a device of its own"):
        sync_transport(mapped, plan_placement(mapped, gpus_here=2))


def test_the_ranks_of_a_worker_lie_in_one_bundle_and_so_on_one_node(quickstart_config: MakeConfig) -> None:
    overrides = ("inference.workers=2", "inference.tensor_parallel=4")
    placement = plan_placement(quickstart_config(*overrides), gpus_here=9)
    assert placement.bundles == [{"CPU": 4, "GPU": 4}] * 2 + [{"CPU": 1, "GPU": 1}]
    assert (placement.cpus, placement.gpus, len(placement.names)) == (9, 9, 3)
    with pytest.raises(PlacementError, match=r"needs 9 GPUs \(2 inference x 4 cuda, .*inference.tensor_parallel"):
        placement.check({"CPU": 64, "GPU": 8})
    placement = plan_placement(quickstart_config("learner.device=cpu", *overrides), gpus_here=0)
    assert placement.bundles == [{"CPU": 4}] * 2 + [{"CPU": 1}]


def test_cpu_workers_share_the_cores(quickstart_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    placement = plan_placement(quickstart_config("inference.workers=3", "learner.threads=2"), gpus_here=0)
    assert (placement.inference_threads, placement.learner_threads) == (2, 2)
    several = plan_placement(quickstart_config("inference.workers=1", "inference.tensor_parallel=3"), gpus_here=0)
    assert several.inference_threads == 2
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert plan_placement(quickstart_config("inference.workers=3"), gpus_here=0).inference_threads == 1


def test_check_says_what_is_missing(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("inference.workers=4"), gpus_here=8)
    placement.check({"CPU": 5, "GPU": 5})
    with pytest.raises(PlacementError, match=r"needs 5 GPUs .*4 inference x cuda, 1 learner.* has 2: 3 missing"):
        placement.check({"CPU": 64, "GPU": 2})
    with pytest.raises(PlacementError, match="needs 5 CPUs"):
        placement.check({"GPU": 8})


def test_what_this_machine_cannot_hold_is_refused_before_a_cluster_starts(
    quickstart_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wanted = plan_placement(quickstart_config("inference.device=cuda"))
    with pytest.raises(PlacementError, match="1 missing"):
        check_placement(wanted, address=None)
    check_placement(wanted, address="10.0.0.1:6379")
    check_placement(plan_placement(quickstart_config("inference.workers=64")), address=None)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0,1", 2), ("GPU-8a,", 1)])
def test_visible_devices_narrow_the_count(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
