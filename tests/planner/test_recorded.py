"""A run as a load and as a set-up: the simulation of it sees what it saw."""

from collections.abc import Callable
from pathlib import Path

import pytest

from olmorl.bench.engine import read_workload
from olmorl.bench.learner import read_batch
from olmorl.contract.errors import ConfigError, DataError
from olmorl.metrics.rollout_log import RolloutRow, write_rollouts
from olmorl.planner.recorded import recorded_load

MakeRow = Callable[..., RolloutRow]


def test_groups_come_back_in_the_order_of_their_admission(tmp_path: Path, row: MakeRow) -> None:
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


def test_the_last_step_of_a_run_is_a_load_to_measure_by(tmp_path: Path, row: MakeRow) -> None:
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
