"""Output files: whatever moment a kill chooses, what was written stays and nothing stands there twice."""

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmorl.contract.errors import ConfigError, DataError
from olmorl.metrics.rollout_log import ROLLOUT_SCHEMA, read_rollouts
from olmorl.rollouts.output import RolloutFiles

IDENTITY = {"model": "m", "seed": 1}


def write(kit: Any, path: Path, count: int, *, first: int = 0, complete: bool = True, per_file: int = 4) -> None:
    files = RolloutFiles(path, rows_per_file=per_file)
    if files.exists:
        assert len(list(files.resume(IDENTITY))) == first
    else:
        files.begin(IDENTITY)
    for index in range(first, count):
        files.write([kit.make_row(index, 0), kit.make_row(index, 1)][: 1 + index % 1])
    files.close(complete=complete)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("count", [3, 4, 9])
def test_files_are_cut_by_rows(kit: Any, tmp_path: Path, suffix: str, count: int) -> None:
    write(kit, tmp_path / f"out{suffix}", count)
    names = [f"out{suffix}", f"out-00001{suffix}", f"out-00002{suffix}"][: -(-count // 4)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, f"out{suffix}.settings.json"])
    rows = kit.read_rows(tmp_path / f"out{suffix}")
    assert [row["prompt_id"] for row in rows] == [f"0_{index}" for index in range(count)]
    assert list(rows[0]) == ROLLOUT_SCHEMA.names


def test_a_file_with_more_rows_than_are_now_wanted_is_full(kit: Any, tmp_path: Path) -> None:
    write(kit, tmp_path / "out.jsonl", 5, complete=False, per_file=9)
    write(kit, tmp_path / "out.jsonl", 8, first=5, per_file=2)
    sizes = [len(p.read_text().splitlines()) for p in sorted(tmp_path.glob("out-*.jsonl"))]
    assert sizes == [2, 1]


def test_parquet_is_that_of_a_run(kit: Any, tmp_path: Path) -> None:
    write(kit, tmp_path / "out.parquet", 3)
    assert pq.read_schema(tmp_path / "out.parquet").equals(ROLLOUT_SCHEMA)
    row = read_rollouts(tmp_path / "out.parquet")[1]
    assert (row.version_spans, row.kv_events) == (((0, 0, 3),), ((0, 0, "prefill"),))
    assert row.logprobs.tolist() == [0, -1, -2] and row.fate is None


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_kill_at_any_byte_costs_no_whole_row(
    kit: Any, tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("kill") / f"out{suffix}"
    total, done = 11, 0
    for _ in range(data.draw(st.integers(1, 3))):
        upto = data.draw(st.integers(done, total))
        write(kit, path, upto, first=done, complete=False)
        done = upto
        growing = [p for p in path.parent.iterdir() if p.name.endswith((".jsonl", ".rows"))]
        if growing and data.draw(st.booleans()):
            last = max(growing, key=lambda p: p.name.removeprefix(".").replace("out.", "out-00000."))
            content = last.read_bytes()
            cut = data.draw(st.integers(0, len(content)))
            os.truncate(last, cut)
            done -= content.count(b"\n") - content[:cut].count(b"\n")
    write(kit, path, total, first=done)
    rows = kit.read_rows(path)
    assert [row["prompt_id"] for row in rows] == [f"0_{index}" for index in range(total)]
    assert not [p.name for p in path.parent.iterdir() if p.name.startswith(".")]


def test_a_kill_between_the_parquet_and_the_end_of_its_rows(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write(kit, path, 4, complete=False)
    lines = (tmp_path / ".out.parquet.rows").read_bytes()
    write(kit, path, 6, first=4, complete=False)
    (tmp_path / ".out.parquet.rows").write_bytes(lines)  # as it was before it was removed
    write(kit, path, 6, first=6)
    assert len(kit.read_rows(path)) == 6 and not (tmp_path / ".out.parquet.rows").exists()


def test_what_is_refused(kit: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet"):
        RolloutFiles(tmp_path / "out.csv", rows_per_file=4)
    path = tmp_path / "out.jsonl"
    write(kit, path, 2)
    with pytest.raises(ConfigError, match="--resume"):
        RolloutFiles(path, rows_per_file=4).begin(IDENTITY)
    with pytest.raises(ConfigError, match="seed was 1 and is now 2"):
        list(RolloutFiles(path, rows_per_file=4).resume({**IDENTITY, "seed": 2}))
    files = RolloutFiles(tmp_path / "nested.jsonl", rows_per_file=4)
    files.begin({"sampling": {"n": 1, "temperature": 1.0, "top_p": 1.0}, "seed": 1})
    files.write([kit.make_row(0, 0)])
    files.close(complete=False)
    with pytest.raises(ConfigError) as error:
        list(files.resume({"sampling": {"n": 1, "temperature": 0.5, "top_p": 1.0}, "seed": 2}))
    changes = "nested.jsonl: sampling.temperature was 1.0 and is now 0.5; seed was 1 and is now 2; give the same"
    assert changes in str(error.value)
    path.write_text("{}\n")
    with pytest.raises(DataError, match=r"out\.jsonl:1"):
        list(RolloutFiles(path, rows_per_file=4).resume(IDENTITY))
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(ConfigError, match="settings"):
        list(RolloutFiles(path, rows_per_file=4).resume(IDENTITY))


def test_one_process_writes_an_output(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = (RolloutFiles(path, rows_per_file=4) for _ in range(2))
    first.begin(IDENTITY)
    with pytest.raises(ConfigError, match="by another process"):
        second.begin(IDENTITY)
    first.write([kit.make_row(0, 0)])
    with pytest.raises(ConfigError, match="by another process"):
        list(RolloutFiles(path, rows_per_file=4).resume(IDENTITY))
    first.write([kit.make_row(1, 0)])
    first.close(complete=False)
    assert len(list(RolloutFiles(path, rows_per_file=4).resume(IDENTITY))) == 2
