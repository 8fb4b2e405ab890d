"""Where prompts may come from, and what each complaint says."""

import gzip
import json
from pathlib import Path

import pytest

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import ConfigError, DataError
from olmorl.data.prompt import Check
from olmorl.data.source import read_source, source_name

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


def read(path: object, **options) -> list[tuple[str, str | tuple, tuple[Check, ...], str]]:
    source = SourceSection(path=str(path), **options)
    return [(place, e.prompt, e.checks, e.data_source) for place, e in read_source(source)]


@pytest.mark.parametrize(
    ("name", "array"),
    [("f.json", True), ("f.json.gz", True), *((n, False) for n in ("f.json", "f.json.gz", "f.jsonl", "f.jsonl.gz"))],
)
def test_json_of_all_kinds(tmp_path: Path, name: str, array: bool) -> None:
    text = "\n " + json.dumps(ROWS, indent=1) if array else "\n".join(["", *map(json.dumps, ROWS)])
    payload = b"\xef\xbb\xbf" * array + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(payload) if name.endswith("gz") else payload)
    found = read(tmp_path / name)
    assert [(p, c, s) for _, p, c, s in found] == [("a", (Check(None, "1"),), "f"), ("b", (Check(None, "2"),), "f")]
    assert found[1][0] == f"{tmp_path / name}:{'row 2' if array else '3'}"


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("f.json", b"[1, 2]", "f.json:row 1: a row must be"),
        ("f.json", b'[{"a": 1},\n {"b": }]', "line 2, column 8"),
        ("f.json", b'{"a": 1', "f.json:1: broken JSON"),
        ("f.jsonl", b'{"a": 1\n{"a": 2}\n', "f.jsonl:1: broken JSON at column 8"),
        ("f.json", b"[" * 100_000, "nested too deeply"),
        ("f.json", b'["\xff"]', "byte 3 of the file is 0xff"),
        ("f.json", b"", "no rows"),
        ("f.json", b"[]", "no rows"),
        ("f.jsonl.gz", b"no gzip", "broken gzip"),
        ("f.jsonl.gz", gzip.compress(b'{"prompt": "a", "answer": "b"}\n' * 99, mtime=0)[:-9], "broken gzip"),
        ("f.json.gz", gzip.compress(b"", mtime=0), "no rows"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, word: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert word in str(caught.value)


def test_what_a_source_says(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"in": "a", "out": "1", "answer": "x"}, {"in": "b", "out": "2"}])))
    found = read(path, prompt_column="in", answer_column="out", name="mine", verifier=("math", "format"), limit=1)
    assert [row[1:] for row in found] == [("a", (Check("math", "1"), Check("format", "1")), "mine")]
    with pytest.raises(DataError, match="no column 'question'; there are in, out, answer"):
        read(path, prompt_column="question")
    with pytest.raises(DataError, match="prompt_column"):
        read(path)
    path.write_text('{"prompt": "a", "reply": "1"}\n')
    with pytest.raises(DataError, match=r"columns prompt, reply hold no answer .*--answer-column") as error:
        read(path)
    assert "dialect" not in str(error.value)
    assert read(path, answer_column="reply")[0][2] == (Check(None, "1"),)


def test_a_row_says_how_long_its_responses_are(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"prompt": "a", "answer": "1", "long": [3, 9]}')
    ((_, row),) = read_source(SourceSection(path=str(path), lengths_column="long"))
    assert row.lengths == (3, 9)
    ((_, row),) = read_source(SourceSection(path=str(path)))
    assert row.lengths is None, "only where the source says so"
    for lengths in ("[]", "[0]", '["3"]', "7", "null"):
        path.write_text(f'{{"prompt": "a", "answer": "1", "long": {lengths}}}')
        with pytest.raises(DataError, match="it must be a list of whole numbers above 0"):
            list(read_source(SourceSection(path=str(path), lengths_column="long")))


def test_several_verifiers_in_a_row(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}],
        "ground_truth": ["7", "x"],
        "dataset": ["gsm8k", "string_f1"],
    }
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(row))
    [(_, _, checks, source)] = read(path)
    assert checks == (Check("gsm8k", "7"), Check("string_f1", "x")) and source == "gsm8k+string_f1"
    assert read(path, verifier=["math", "format"])[0][2] == (Check("math", "7"), Check("format", "x"))
    with pytest.raises(DataError, match="2 ground truths, but the verifiers are math"):
        read(path, verifier="math")
    path.write_text(json.dumps({**row, "dataset": ["string_f1"]}))
    assert read(path)[0][2] == (Check("string_f1", ["7", "x"]),)
    path.write_text(json.dumps({"prompt": "q", "answer": "7", "verifier": "math"}))
    assert read(path)[0][2] == (Check("math", "7"),)


def test_several_verifiers_in_the_verifier_column(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"

    def checks(answer: object, verifier: object) -> object:
        path.write_text(json.dumps({"prompt": "q", "answer": answer, "verifier": verifier}))
        return read(path)[0][2]

    assert checks(["7", "^7$"], ["math", "regex"]) == (Check("math", "7"), Check("regex", "^7$"))
    assert checks("7", ["math", "gsm8k"]) == (Check("math", "7"), Check("gsm8k", "7"))
    assert checks(["7", "07"], "math") == checks(["7", "07"], ["math"]) == (Check("math", ["7", "07"]),)
    assert checks("7", "") == checks("7", None) == (Check(None, "7"),)
    with pytest.raises(DataError, match="verifier names 2 verifiers for 3 ground truths"):
        checks(["7", "8", "9"], ["math", "regex"])
    for bad in ([], ["math", ""], {"math": 1}, 3):
        with pytest.raises(DataError, match=r"verifier is .*; it must name a verifier, or several in a list"):
            checks("7", bad)


def test_names() -> None:
    assert source_name(SourceSection(path="owner/set")) == "owner/set"
    assert source_name(SourceSection(path="reasoning_gym:chain_sum")) == "chain_sum"
    assert source_name(SourceSection(path=__file__)) == "test_sources.py"
    assert source_name(SourceSection(path="x", name="y")) == "y"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)


def test_hugging_face_folders(tmp_path: Path, offline, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "two")
    (tmp_path / "files").mkdir()
    train.to_json(tmp_path / "files" / "train.jsonl")
    for folder in ("one", "two", "files"):
        found = read(tmp_path / folder)
        assert [row[1:] for row in found] == [("a", (Check(None, "1"),), folder), ("b", (Check(None, "2"),), folder)]
    assert len(read(tmp_path / "two", split="test")) == 1
    assert len(read(tmp_path / "files", streaming=True, limit=1)) == 1
    with pytest.raises(DataError, match="no split 'dev'; there are train, test"):
        read(tmp_path / "two", split="dev")
    with pytest.raises(DataError, match="dev"):
        read(tmp_path / "files", split="dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        read(tmp_path / "empty")


def test_a_hub_id_that_cannot_be_had(offline) -> None:
    with pytest.raises(DataError, match="nobody/nothing-at-all"):
        read("nobody/nothing-at-all")


def test_procedural_tasks_are_reproducible() -> None:
    pytest.importorskip("reasoning_gym")
    path = "reasoning_gym:chain_sum"
    first = read(path, limit=5, options={"seed": 1, "max_terms": 3})
    assert first == read(path, limit=5, options={"seed": 1, "max_terms": 3})
    assert first != read(path, limit=5, options={"seed": 2, "max_terms": 3})
    assert len(first) == 5 and {row[3] for row in first} == {"chain_sum"}
    [check] = first[0][2]
    assert check.verifier == "reasoning_gym" and check.ground_truth["metadata"]["source_dataset"] == "chain_sum"
    with pytest.raises(DataError, match="did you mean 'chain_sum'"):
        read("reasoning_gym:chain_sun")
    with pytest.raises(DataError, match="refuses the options"):
        read(path, options={"no_such_option": 1})
    with pytest.raises(DataError, match="refuses the options"):
        read(path, options={"min_terms": 5, "max_terms": 2})


def test_procedural_tasks_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"olmorl\[reasoning-gym\]"):
        read("reasoning_gym:chain_sum")
