"""What an update costs follows the bytes of the weights, the links they go over, and the number of engines."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from olmorl.config.load import load_config
from olmorl.contract.errors import ConfigError
from olmorl.metrics.rollout_log import write_rollouts
from olmorl.planner.check import compare
from olmorl.planner.costs import DEVICES, SyncCost
from olmorl.planner.plan import setup_of
from olmorl.planner.question import question_of
from olmorl.planner.setup import Setup, Sharing
from olmorl.planner.shape import SHAPES
from olmorl.planner.simulation import Simulation

CONFIG = str(Path(__file__).parents[2] / "configs" / "qwen3_8b_8gpus.toml")


def test_an_update_by_hand() -> None:
    """7.6 billion weights of two bytes over links of 25 GB/s; then read and written in the memory of an H100."""
    cost = SyncCost(
        shape=SHAPES["qwen2.5-7b"], memory_bandwidth=DEVICES["h100"].bandwidth, latency=0.5, snapshot=0.25, swap=0.0
    )
    assert cost.snapshot_seconds == pytest.approx(0.25 + 15.231e9 / 25e9, rel=1e-3)
    assert cost.transfer_seconds == pytest.approx(0.5 + 15.231e9 / 25e9, rel=1e-3)
    assert cost.swap_seconds == pytest.approx(2 * 15.231e9 / 3.35e12, rel=1e-3)


@pytest.mark.parametrize(("engines", "levels"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_gloo_hands_on_down_a_tree_and_nccl_streams(engines: int, levels: int) -> None:
    cost = SyncCost(shape=SHAPES["qwen3-8b"], engines=engines, latency=0.0)
    once = cost.shape.weight_bytes / cost.bandwidth
    assert cost.transfer_seconds == replace(cost, transport="ipc").transfer_seconds == pytest.approx(once)
    assert replace(cost, transport="gloo").transfer_seconds == pytest.approx(levels * once)


def test_a_simulated_engine_waits_as_long(make_setup: Callable[..., Setup]) -> None:
    sync = replace(make_setup().sync, memory_bandwidth=1e8, engines=8, transport="gloo")
    stalls = {
        mode: Simulation(make_setup(sync=sync, sync_mode=mode, async_steps=2)).run(10).stall_seconds
        for mode in ("inflight", "pause")
    }
    swap = sync.swap + 2 * sync.shape.weight_bytes / 1e8
    assert stalls["inflight"] == pytest.approx(swap)
    assert stalls["pause"] == pytest.approx(swap + sync.latency + 4 * sync.shape.weight_bytes / sync.bandwidth)


@pytest.mark.parametrize(
    ("settings", "mode", "transport"),
    [
        ((), "inflight", "nccl"),
        (("sync.staging=none",), "pause", "nccl"),
        (("sync.staging=none", "sync.mode=drain"), "drain", "nccl"),
        (("sync.transport=gloo",), "inflight", "gloo"),
        (("inference.device=cpu",), "inflight", "gloo"),
    ],
)
def test_a_plan_has_the_updates_of_its_config(settings: Any, mode: str, transport: str) -> None:
    """All engines count, though fewer are simulated."""
    question = question_of(load_config(CONFIG, settings), num_devices=64, device_name="h100")
    setup, _ = setup_of(question, 48, 2, 8, most=4)
    assert setup.inference_workers < 24
    assert (setup.sync_mode, setup.sync.transport, setup.sync.engines) == (mode, transport, 24)
    assert setup.sync.memory_bandwidth == 2 * DEVICES["h100"].bandwidth


def test_runs_of_other_engines_say_nothing_of_an_update(tmp_path: Path, row: Callable[..., Any]) -> None:
    """Drained, synchronous: an update is a part of every step, and runs differ in nothing else."""
    runs = []
    for name, engines, seconds in (("one", 1, 0.5), ("four", 4, 8.0), ("four_slower", 4, 9.0)):
        run = tmp_path / name
        (run / "rollouts").mkdir(parents=True)
        (run / "config.toml").write_text(
            'model.path = "smollm2-135m"\ndata.train = "x.jsonl"\nsync.mode = "drain"\n'
            f"inference.workers = {engines}\nrollout.async_steps = 0\n"
            "rollout.prompts_per_step = 1\nrollout.samples_per_prompt = 2\n"
        )
        figures = {"time/step": 10.0, "throughput/trained_tokens_per_second": 1.0, "sync/seconds": seconds} | {
            f"learner_time/{kind}": 1.0 for kind in ("waiting", "training", "sending")
        }
        lines = (json.dumps({"progress/step": step} | figures) + "\n" for step in range(1, 6))
        (run / "metrics.jsonl").write_text("".join(lines))
        rows = [row("0_1", sample, 4, 1.5) for sample in range(2)]
        write_rollouts(run / "rollouts" / "step_000001.parquet", rows)
        runs.append(run)
    engine = {"profile": [[n, 3e8 * n, 0.01] for n in range(1, 10)], "peak_tflops": 0.1, "peak_gbs": 20.0}
    learner = {"flops": 2e12, "seconds": 2.0, "short_flops": 1e12, "short_seconds": 1.0, "peak_tflops": 1.0}
    found = compare(runs, engine=engine, learner=learner, sharing=Sharing())
    one, four, slower = (compared.planned.step_seconds for compared in found)
    assert four - one == pytest.approx(7.5) and slower == four
    with pytest.raises(ConfigError, match="lacks profile, peak_tflops, peak_gbs; make it with olmorl bench engine"):
        compare(runs, engine={}, learner=learner, sharing=Sharing())
    with pytest.raises(ConfigError, match="lacks flops, seconds"):
        compare(runs, engine=engine, learner={}, sharing=Sharing())
