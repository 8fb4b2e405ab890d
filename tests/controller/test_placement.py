import os
from collections.abc import Callable

import pytest

from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, PlacementError
from olmorl.controller.compose import sync_transport
from olmorl.controller.placement import Node, count_gpus, gpu_types, plan_placement, this_machine

MakeConfig = Callable[..., Config]


def test_auto_takes_gpus_where_there_are_some(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("inference.workers=2"), [Node("head", 8), Node("a", 8, 3)])
    assert (placement.inference_device, placement.learner_device) == ("cuda", "cuda")
    assert (placement.cpus, placement.gpus) == (3, 3)
    assert placement.inference_threads is None
    assert plan_placement(quickstart_config(), [Node("a", 8)]).inference_device == "cpu"


def test_a_device_that_is_named_is_taken(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("learner.device=cpu"), [Node("a", 8, 2)])
    assert placement.engine_bundles == [{"CPU": 1, "GPU": 1}]
    assert placement.learner_bundles == [[{"CPU": 1}]]


def test_one_gpu_may_hold_both_roles(quickstart_config: MakeConfig) -> None:
    config = quickstart_config("inference.gpu_share=0.4", "learner.gpu_share=0.6")
    placement = plan_placement(config, [Node("a", 2, 1)])
    assert placement.engine_bundles == [{"CPU": 1, "GPU": 0.4}] and placement.gpus == 1 and placement.shares_gpu
    assert placement.learner_bundles == [[{"CPU": 1, "GPU": 0.6}]]
    placement.check([Node("a", 2, 1)])
    with pytest.raises(PlacementError, match="no node has the pieces together"):
        placement.check([Node("a", 1, 1), Node("b", 1, 1)])
    assert sync_transport(config, placement) == "ipc"
    apart, one, two = quickstart_config(), [Node("a", 8)], [Node("a", 8, 2)]
    assert sync_transport(apart, plan_placement(apart, two)) == "nccl"
    assert sync_transport(config, plan_placement(config, one)) == "gloo"
    mapped = quickstart_config("sync.transport=ipc")
    assert sync_transport(mapped, plan_placement(mapped, one)) == "ipc"
    with pytest.raises(ConfigError, match="the learner is on cuda, each with a device of its own"):
        sync_transport(mapped, plan_placement(mapped, two))


def test_the_ranks_of_a_worker_lie_in_one_bundle_and_so_on_one_node(quickstart_config: MakeConfig) -> None:
    overrides = ("inference.workers=2", "inference.tensor_parallel=4")
    placement = plan_placement(quickstart_config(*overrides), [Node("a", 64, 9)])
    assert placement.engine_bundles == [{"CPU": 4, "GPU": 4}]
    assert placement.learner_bundles == [[{"CPU": 1, "GPU": 1}]]
    assert (placement.cpus, placement.gpus) == (9, 9)
    placement.check([Node("a", 64, 5), Node("b", 64, 4)])
    with pytest.raises(PlacementError, match=r"needs 9 GPUs \(2 inference x 4 cuda, .* inference.workers = 1, "):
        placement.check([Node("a", 64, 8)])
    with pytest.raises(PlacementError, match=r"no node has the pieces together.*lower inference.tensor_parallel"):
        placement.check([Node(name, 64, 3) for name in "abc"])
    placement = plan_placement(quickstart_config("learner.device=cpu", *overrides), [Node("a", 16)])
    assert placement.engine_bundles == [{"CPU": 4}] and placement.cpus == 9


def test_learners_that_share_a_copy_are_placed_together(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("learner.workers=8", "learner.shard_size=4"), [Node("a", 8, 16)])
    assert [len(group) for group in placement.learner_bundles] == [4, 4]
    assert len(plan_placement(quickstart_config("learner.workers=8"), [Node("a", 8)]).learner_bundles) == 1


def test_cpu_workers_share_the_cores(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("inference.workers=3", "learner.threads=2"), [Node("a", 9)])
    assert (placement.inference_threads, placement.learner_threads) == (2, 2)
    several = plan_placement(quickstart_config("inference.workers=1", "inference.tensor_parallel=3"), [Node("a", 9)])
    assert several.inference_threads == 2
    assert plan_placement(quickstart_config("inference.workers=3"), [Node("a", 2)]).inference_threads == 1


def test_check_says_what_is_missing_and_what_would_fit(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("inference.workers=4", "learner.workers=2"), [Node("a", 8, 8)])
    placement.check([Node("a", 5, 5), Node("b", 2, 1)])
    nodes = [
        Node.of("10.0.0.1", {"CPU": 64.0, "GPU": 2.0, "accelerator_type:H100": 1.0}),
        Node("10.0.0.2", 1, 1, "A100"),
    ]
    with pytest.raises(PlacementError) as caught:
        placement.check(nodes)
    assert str(caught.value) == (
        "this run needs 6 GPUs (4 inference x cuda, 2 learner x cuda: 6 CPU, 6 GPU) and the cluster has 3: 3 missing. "
        "Nodes: 10.0.0.1 (64 CPU, 2 H100); 10.0.0.2 (1 CPU, 1 A100). "
        "Add nodes, or take the nearest that fits: inference.workers = 1, learner.workers = 2"
    )
    with pytest.raises(PlacementError, match=r"needs 6 CPUs .*learner.workers = 2"):
        placement.check([Node("a", 5, 8)])
    with pytest.raises(PlacementError, match=r"lower learner.workers: no smaller run fits while 2 learners"):
        placement.check([Node("a", 9, 1)])


@pytest.mark.parametrize(
    ("settings", "nodes", "mend"),
    [
        ([], [Node("a", 1)], "Add nodes: no smaller run fits either"),
        (["inference.device=cuda"], [Node("a", 2)], "Add nodes, or set inference.device and learner.device to 'cpu'"),
        (["inference.device=cuda"], [Node("a", 1)], "Add nodes with GPUs"),
        (["inference.tensor_parallel=8"], [Node("a", 8, 4)], "Add nodes, or lower inference.tensor_parallel"),
        (["learner.workers=8", "learner.shard_size=4"], [Node("a", 8, 4)], "lower learner.shard_size"),
        (["inference.workers=9"], [Node(f"n{i}", 1, 0) for i in range(4)], "Nodes: 4 like n0 (1 CPU). Add nodes, or"),
    ],
)
def test_what_is_advised_would_help(
    quickstart_config: MakeConfig, settings: list[str], nodes: list[Node], mend: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        plan_placement(quickstart_config(*settings), nodes).check(nodes)
    assert mend in str(caught.value)


def test_what_lies_in_pieces_does_not_fit(quickstart_config: MakeConfig) -> None:
    """Enough GPUs and enough CPUs, but not on the same machine."""
    placement = plan_placement(quickstart_config(), [Node("a", 8, 8)])
    with pytest.raises(PlacementError, match="no node has the pieces together"):
        placement.check([Node("a", 1, 8), Node("b", 8)])


def test_workers_without_a_gpu_leave_room_to_those_with_one(quickstart_config: MakeConfig) -> None:
    placement = plan_placement(quickstart_config("inference.workers=2", "learner.device=cpu"), [Node("a", 8, 8)])
    placement.check([Node("a", 2, 2), Node("b", 1)])


def test_kinds_of_gpus_are_chosen_by_name(quickstart_config: MakeConfig) -> None:
    nodes = [Node("a", 16, 2, "A100"), Node("b", 16, 2, "H100")]
    assert gpu_types([*nodes, Node("head", 4)]) == ["A100", "H100"]
    settings = ["inference.gpu_type=A100", "learner.gpu_type=H100", "learner.workers=2"]
    placement = plan_placement(quickstart_config(*settings, "inference.workers=2"), nodes)
    assert placement.engine_bundles == [{"CPU": 1, "GPU": 1, "accelerator_type:A100": 0.001}]
    placement.check(nodes)
    with pytest.raises(PlacementError, match=r"1 inference x A100, 3 learner x H100.* no node has the pieces"):
        plan_placement(quickstart_config(*settings, "learner.workers=3"), nodes).check(nodes)
    with pytest.raises(PlacementError, match=r"inference x B200"):
        plan_placement(quickstart_config("inference.gpu_type=B200"), nodes).check(nodes)


def test_what_takes_any_gpu_leaves_those_that_are_named(quickstart_config: MakeConfig) -> None:
    nodes = [Node("a", 16, 2, "A100"), Node("b", 16, 2, "H100")]
    plan_placement(quickstart_config("learner.gpu_type=A100", "learner.workers=2"), nodes).check(nodes)


def test_what_this_machine_cannot_hold_is_refused(
    quickstart_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(PlacementError, match=r"1 missing.*set inference.device and learner.device to 'cpu'"):
        plan_placement(quickstart_config("inference.device=cuda")).check([this_machine()])
    many = plan_placement(quickstart_config("inference.workers=64"))
    many.check([this_machine(cpus=many.cpus)])
    assert this_machine().cpus == os.cpu_count()


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0,1", 2), ("GPU-8a,", 1)])
def test_visible_devices_narrow_the_count(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
