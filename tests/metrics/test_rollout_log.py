"""Rollout files hold exactly what was written, under exactly the promised columns."""

import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.metrics.rollout_log import RolloutRow, read_rollouts, write_rollouts

COLUMNS = """
    rollout_id, prompt_id, sample, step, attempt, data_source, prompt_token_ids, token_ids, loss_mask, logprobs,
    raw_logprobs, version_spans, kv_events, text, finish_reason, reward, verdict, advantage, fate, seed, worker,
    t_admitted, t_first_token, t_finished, t_trained, prompt, ground_truth, verdict_detail,
    learner_logprobs
""".replace(",", " ").split()


def row(sample: int, num_tokens: int) -> RolloutRow:
    rng = np.random.default_rng(sample)
    return RolloutRow(
        rollout_id=f"0/17/{sample}",
        prompt_id="0/17",
        sample=sample,
        step=12,
        attempt=0,
        data_source="chain_sum",
        prompt_token_ids=np.arange(5, dtype=np.int32),
        token_ids=rng.integers(0, 99, num_tokens).astype(np.int32),
        loss_mask=rng.random(num_tokens) < 0.9,
        logprobs=rng.random(num_tokens, dtype=np.float32),
        raw_logprobs=rng.random(num_tokens, dtype=np.float32),
        version_spans=((11, 0, num_tokens // 2), (12, num_tokens // 2, num_tokens)),
        kv_events=((0, 11, "prefill"), (5 + num_tokens // 2, 12, "swap")),
        text="7+5=12 ✓",
        finish_reason="stop",
        reward=1.0,
        verdict="scored",
        advantage=0.25,
        fate="trained",
        seed=2**62 + sample,
        worker="inference-0",
        t_admitted=1.5,
        t_first_token=1.6,
        t_finished=2.5,
        t_trained=3.5,
        learner_logprobs=np.where(rng.random(num_tokens) < 0.8, rng.random(num_tokens), np.nan).astype(np.float32),
    )


def untrained(sample: int) -> RolloutRow:
    """Everything that may be missing is missing."""
    empty = np.empty(0, dtype=np.float32)
    return replace(
        row(sample, 0),
        data_source=None,
        token_ids=np.empty(0, dtype=np.int32),
        loss_mask=np.empty(0, dtype=bool),
        logprobs=empty,
        raw_logprobs=empty,
        version_spans=(),
        kv_events=(),
        reward=None,
        verdict=None,
        advantage=None,
        fate="aborted",
        seed=None,
        t_first_token=None,
        t_finished=None,
        t_trained=None,
        learner_logprobs=empty,
    )


def assert_same(left: RolloutRow, right: RolloutRow) -> None:
    for field in fields(RolloutRow):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(0, 9)],
        [untrained(0)],
        [row(0, 3), untrained(1), row(2, 1), untrained(3)],
    ],
    ids=["none", "one", "untrained", "mixed"],
)
def test_what_is_written_is_read_back(tmp_path: Path, rows: list[RolloutRow]) -> None:
    path = tmp_path / "rollouts" / "step_000012.parquet"
    write_rollouts(path, rows)
    back = read_rollouts(path)
    assert len(back) == len(rows)
    for left, right in zip(rows, back, strict=True):
        assert_same(left, right)


@given(
    st.lists(
        st.tuples(st.none() | st.text(max_size=5), st.none() | st.floats(allow_nan=False), st.integers(0, 9)),
        max_size=5,
    )
)
def test_any_texts_and_numbers_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str | None, float | None, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    rows = [
        replace(row(i, length), prompt=text, text=text or "", advantage=number)
        for i, (text, number, length) in enumerate(drawn)
    ]
    write_rollouts(path, rows)
    pq.read_table(path).validate(full=True)
    for left, right in zip(rows, read_rollouts(path), strict=True):
        assert_same(left, right)


WITHOUT_PANDAS = """
import sys
from pathlib import Path
from olmorl.metrics.rollout_log import write_rollouts
from tests.metrics.test_rollout_log import row, untrained

write_rollouts(Path(sys.argv[1]), [row(0, 3), untrained(1)])
assert "pandas" not in sys.modules
"""


def test_a_driver_writes_without_pandas(tmp_path: Path) -> None:
    """Whose import takes a third of a second, in the middle of the first step."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", WITHOUT_PANDAS, str(tmp_path / "f")], cwd=root, check=True, timeout=60)


def test_half_of_a_surrogate_pair_is_written_as_an_escape(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "f", [replace(row(0, 3), ground_truth="\ud83d", verdict_detail=None)])
    [written] = read_rollouts(tmp_path / "f")
    assert (written.ground_truth, written.verdict_detail) == ("\\ud83d", None)


def test_the_columns_are_the_promised_ones(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000012.parquet"
    write_rollouts(path, [row(0, 4)])
    schema = pq.read_schema(path)
    assert schema.names == COLUMNS
    assert pq.read_table(path).to_pylist()[0]["version_spans"][0] == {"version": 11, "start": 0, "end": 2}


def test_a_file_of_before_a_column_was_added_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000012.parquet"
    write_rollouts(path, [replace(row(0, 4), prompt="1+1=", ground_truth='"2"', verdict_detail="answer 2")])
    table = pq.read_table(path)
    assert table.column("ground_truth").to_pylist() == ['"2"']
    pq.write_table(table.drop_columns(["prompt", "ground_truth", "verdict_detail", "learner_logprobs"]), path)
    assert_same(read_rollouts(path)[0], replace(row(0, 4), learner_logprobs=np.zeros(0, np.float32)))


def test_one_rollout_is_found_by_its_id(tmp_path: Path) -> None:
    path = tmp_path / "step_000012.parquet"
    write_rollouts(path, [row(sample, 3 + sample) for sample in range(4)])
    [found] = read_rollouts(path, rollout_id="0/17/2")
    assert_same(found, row(2, 5))
    assert read_rollouts(path, rollout_id="0/17/9") == []


def test_a_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000001.parquet"
    write_rollouts(path, [row(0, 4), row(1, 4)])
    write_rollouts(path, [row(2, 4)])
    assert [r.sample for r in read_rollouts(path)] == [2]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000001.parquet"
    write_rollouts(path, [row(0, 4)])
    with pytest.raises(OverflowError):
        write_rollouts(path, [replace(row(1, 4), seed=2**80)])
    assert [r.sample for r in read_rollouts(path)] == [0]


def test_a_step_is_written_well_within_its_budget(tmp_path: Path) -> None:
    rows = [row(sample, 60) for sample in range(400)]
    seconds = []
    for step in range(5):
        start = time.perf_counter()
        write_rollouts(tmp_path / "rollouts" / f"step_{step:06d}.parquet", rows)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1, f"400 rows of 60 tokens took {seconds}"
