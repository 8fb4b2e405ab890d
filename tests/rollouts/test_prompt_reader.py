"""Prompts in any dialect, also without answers; what does not fit is counted."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import ConfigError, DataError
from olmorl.data.tokenizer import PromptEncoder, load_tokenizer
from olmorl.rollouts.prompt_reader import PromptReader, count_rows, full_rewards

ROWS = [
    {"prompt": "1+2="},
    {"question": "1+2=", "answer": "3"},
    {"problem": "1+2=", "solution": None},
    {"messages": [{"role": "user", "content": "1+2="}], "dataset": "gsm8k", "ground_truth": None},
    {"prompt": [{"role": "user", "content": "1+2="}], "data_source": "mine", "reward_model": {}},
]


def reader(kit: Any, path: Path, **options: Any) -> PromptReader:
    encoder = PromptEncoder(load_tokenizer(kit.model))
    settings = {"encoder": encoder, "max_prompt_tokens": 10, "verifiers": None, "scored": False}
    return PromptReader(SourceSection(path=str(path)), **(settings | options))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_without_a_verifier_no_answer_is_needed(kit: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ROWS)
    prompts = list(reader(kit, path))
    assert [p.text for p in prompts] == ["1+2="] * 5 and not any(p.checks for p in prompts)
    assert [p.data_source for p in prompts] == ["p", "p", "p", "gsm8k", "mine"]
    assert [p.prompt_id for p in prompts] == [f"0_{i}" for i in range(5)]
    with pytest.raises(DataError, match=r"p\.jsonl:1"):
        list(reader(kit, path, scored=True))


def test_what_is_too_long_keeps_its_place(kit: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "1" * n} for n in (3, 30, 5)])
    read = reader(kit, path)
    assert [p.index for p in read] == [0, 2] and (read.num_read, read.num_too_long) == (3, 1)


def test_a_bad_row_is_named(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": 3}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2"):
        list(reader(kit, path))
    write(path, [{"prompt": "1"}, {"prompt": "\ud800"}])
    with pytest.raises(DataError, match=r"p\.jsonl:2: .*not UTF-8"):
        list(reader(kit, path))
    path.write_text("")
    with pytest.raises(DataError, match="no rows"):
        list(reader(kit, path))


def test_rows_are_counted_where_that_is_cheap(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ROWS[:2])
    assert count_rows(SourceSection(path=str(path))) == 2
    assert count_rows(SourceSection(path=str(path), limit=1)) == 1
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write(path.read_text() + "\n")
    assert count_rows(SourceSection(path=str(tmp_path / "p.jsonl.gz"))) == 2
    pq.write_table(pa.table({"prompt": ["1", "2", "3"]}), tmp_path / "p.parquet")
    assert count_rows(SourceSection(path=str(tmp_path / "p.parquet"))) == 3
    assert count_rows(SourceSection(path="owner/name")) is None


def test_the_full_reward_is_that_of_the_row(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "answer": "1", "verifier": ["math", "format", "regex"][:n]} for n in (1, 3, 2)]
    source = SourceSection(path=str(write(tmp_path / "p.jsonl", rows)), limit=1)
    own = full_rewards(source, verifiers=None, full_reward=len)
    assert [own(2), own(0), own(1)] == [2, 1, 3], "whatever the order, and beyond the limit"
    with pytest.raises(ConfigError, match=r"samples of prompt 3, which .* lacks"):
        own(3)
    assert full_rewards(source, verifiers=("math", "format"), full_reward=len)(7) == 2
