"""A run as a load and as a set-up: the simulation of it sees what it saw."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from olmorl.bench.engine import read_workload
from olmorl.bench.learner import read_batch
from olmorl.contract.errors import ConfigError, DataError
from olmorl.metrics.rollout_log import RolloutRow, write_rollouts
from olmorl.planner.recorded import recorded_load

ROW = RolloutRow(
    rollout_id="", prompt_id="", sample=0, step=1, attempt=0, data_source="s",
    prompt_token_ids=np.zeros(7, np.int32), token_ids=np.zeros(1, np.int32), loss_mask=np.ones(1, bool),
    logprobs=np.zeros(1, np.float32), raw_logprobs=np.zeros(1, np.float32), version_spans=((0, 0, 1),), kv_events=(),
    text="", finish_reason="length", reward=1.0, verdict="scored", advantage=0.0, fate="trained", seed=0, worker="w",
    t_admitted=0.0, t_first_token=0.0, t_finished=0.0, t_trained=0.0, prompt="", ground_truth="", verdict_detail="",
)  # fmt: skip


def row(prompt_id: str, sample: int, length: int, t_admitted: float, fate: str = "trained") -> RolloutRow:
    tokens = np.zeros(length, np.int32)
    return replace(
        ROW, prompt_id=prompt_id, sample=sample, token_ids=tokens, loss_mask=np.ones(length, bool),
        logprobs=np.zeros(length, np.float32), raw_logprobs=np.zeros(length, np.float32), fate=fate,
        t_admitted=t_admitted, version_spans=((0, 0, length),),
    )  # fmt: skip


def test_groups_come_back_in_the_order_of_their_admission(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    late = [row("0_3", 1, 5, 2.5), row("0_3", 0, 9, 2.5)]
    early = [row("0_7", 0, 4, 1.5, "zero_variance"), row("0_7", 1, 6, 1.5, "zero_variance")]
    surplus = [row("0_9", 0, 2, 3.5, "surplus"), row("0_9", 1, 3, 3.5, "surplus")]
    write_rollouts(tmp_path / "rollouts" / "step_000001.parquet", late)
    write_rollouts(tmp_path / "rollouts" / "step_000002.parquet", [*early, *surplus])
    load = recorded_load(tmp_path)
    assert list(load.groups) == [([4, 6], False), ([9, 5], True), ([2, 3], True)]
    assert load.prompt_tokens == 7
    assert load.group(4, 3, seed=0) == ([9, 5, 9], True), "over and over, filled up with its own"


def test_a_run_without_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rollouts"):
        recorded_load(tmp_path)


def test_the_last_step_of_a_run_is_a_load_to_measure_by(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts" / "step_000001.parquet", [row("0_1", 0, 3, 0.5)])
    wasted = [row("0_4", 0, 2, 1.5, "zero_variance"), row("0_4", 1, 0, 1.5, "aborted")]
    write_rollouts(
        tmp_path / "rollouts" / "step_000002.parquet", [row("0_3", 0, 9, 2.5), row("0_3", 1, 5, 2.5), *wasted]
    )
    assert [(len(g.prompt), g.lengths) for g in read_workload(tmp_path)] == [(7, [9, 5]), (7, [2, 1])]
    assert [len(sample.token_ids) for sample in read_batch(tmp_path)] == [9, 5]
    with pytest.raises(DataError, match="has no rollouts"):
        read_workload(tmp_path / "rollouts")
