import json
import os
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from olmorl.contract.errors import DataError
from olmorl.data.prompt import Check
from olmorl.data.prompt_set import load_prompts
from olmorl.data.tokenizer import PromptEncoder, load_tokenizer

CHAT = [{"role": "user", "content": "q"}]
GSM8K = Path(os.environ.get("OLMORL_TEST_GSM8K", ""))


@pytest.fixture
def load(make_tokenizer):
    def load(*files: Path, max_prompt_tokens: int = 100, verifiers: tuple[str, ...] | None = None, **options):
        encoder = PromptEncoder(load_tokenizer(str(make_tokenizer())), **options)
        limits = {"max_prompt_tokens": max_prompt_tokens, "verifiers": verifiers}
        return load_prompts([str(f) for f in files], encoder=encoder, **limits)

    return load


def write(path: Path, *rows: object) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("row", "truth", "source", "verifier"),
    [
        ({"messages": CHAT, "ground_truth": "7", "dataset": "gsm8k"}, "7", "gsm8k", "gsm8k"),
        ({"messages": CHAT, "ground_truth": ["7"], "dataset": ["gsm8k"]}, "7", "gsm8k", "gsm8k"),
        ({"prompt": "q", "ground_truth": ["7"], "dataset": ["gsm8k"]}, "7", "gsm8k", "gsm8k"),
        (
            {"prompt": CHAT, "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "7"}},
            "7",
            "openai/gsm8k",
            "openai/gsm8k",
        ),
        ({"prompt": "q", "answer": "7"}, "7", "f", None),
        ({"question": "q", "answer": "1 + 6 = <<1+6=7>>7\n#### 7"}, "7", "f", None),
        ({"question": "q", "answer": "work\n#### 1,007 "}, "1,007", "f", None),
        ({"problem": "q", "solution": "so \\boxed{7}", "level": 3}, "so \\boxed{7}", "f", None),
        ({"prompt": CHAT, "solution": "7", "data_source": "mine"}, "7", "mine", None),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": "7"}], "ground_truth": "7", "dataset": "x"},
            "7",
            "x",
            "x",
        ),
    ],
)
def test_dialects(load, tmp_path: Path, suffix, row, truth, source, verifier) -> None:
    prompts = load(write(tmp_path / f"f{suffix}", row))
    [example] = prompts.examples
    assert example.text == "<s>[user]q[assistant]"
    assert (example.checks, example.data_source) == ((Check(verifier, truth),), source)
    assert prompts.verifiers == (verifier,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["holds no rows"]),
        (b"\n\n", ["holds no rows"]),
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": \n', ["f.jsonl:2", "broken JSON"]),
        (b'{"prompt": "\xff", "answer": "b"}\n', ["f.jsonl:1", "not UTF-8"]),
        (b"[1]\n", ["f.jsonl:1", "JSON object"]),
        (b'{"text": "a", "id": 1}\n', ["f.jsonl:1", "text, id", "open-instruct", "verl", "GSM8K"]),
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n', ["f.jsonl:2"]),
        (b'{"prompt": "a", "answer": null}\n', ["f.jsonl:1", "answer is missing"]),
        (b'{"prompt": "", "answer": "b"}\n', ["f.jsonl:1", "prompt is ''"]),
        (b'{"prompt": [{"role": "user"}], "answer": "b"}\n', ["f.jsonl:1", "role and content"]),
        (b'{"prompt": "a", "data_source": "s", "reward_model": {}}\n', ["f.jsonl:1", "ground_truth is missing"]),
        (b'{"prompt": "a", "data_source": "s", "reward_model": 3}\n', ["f.jsonl:1", "reward_model is 3"]),
        (b'{"messages": "a", "ground_truth": "1", "dataset": ["x", "y"]}\n', ["2 verifiers for 1 ground truths"]),
        (b'{"messages": "a", "ground_truth": "1", "dataset": [3]}\n', ["dataset is [3]"]),
        (b'{"messages": [], "ground_truth": "1", "dataset": "x"}\n', ["messages is []"]),
        (b"[" * 100_000 + b"\n", ["f.jsonl:1", "nested too deeply"]),
        (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}\n", ["f.jsonl:1", "4300 digits"]),
        (b'{"prompt": "a\\ud83d", "answer": "b"}\n', ["f.jsonl:1", "not UTF-8", "ud83d"]),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}], "answer": "b"}\n', ["f.jsonl:1", "not UTF-8"]),
        (b'{"prompt": "a", "answer": "b", "data_source": "\\ud83d"}\n', ["f.jsonl:1", "not UTF-8"]),
        (b'{"prompt": "a", "answer": "b", "verifier": ["math", 7]}\n', ["f.jsonl:1", "is ['math', 7]", "a verifier"]),
        (b'{"prompt": "a", "answer": "b", "environment": 3}\n', ["f.jsonl:1", "environment is 3"]),
    ],
)
def test_bad_files(load, tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(path)
    for word in words:
        assert word in str(caught.value)


def test_missing_and_unknown_files(load, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such data file"):
        load(tmp_path / "nope.jsonl")
    (tmp_path / "f.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"\.jsonl.* or \.parquet"):
        load(tmp_path / "f.csv")
    (tmp_path / "f.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="parquet"):
        load(tmp_path / "f.parquet")


def test_too_long_prompts_are_left_out_counted_and_said(load, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a" * n, "answer": "1"} for n in (1, 50, 2)]
    path = write(tmp_path / "f.jsonl", *rows)
    prompts = load(path, max_prompt_tokens=30)
    assert [example.index for example in prompts.examples] == [0, 2]
    assert prompts.num_too_long == 1 and "1 of 3 prompts are longer than 30" in caplog.text
    with pytest.raises(DataError, match=r"all 3 prompts are longer than 3 tokens.*max_prompt_tokens"):
        load(path, max_prompt_tokens=3)


def test_lengths_are_counted_for_each_source(load, tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *[{"prompt": "a" * n, "answer": "1"} for n in (1, 50, 2)])
    b = write(tmp_path / "b.jsonl", *[{"prompt": "b" * n, "answer": "1"} for n in (1, 2)])
    prompts = load(a, b, max_prompt_tokens=30)
    assert [(s.name, s.size, s.per_epoch, s.num_too_long) for s in prompts.shares] == [("a", 2, 2, 1), ("b", 2, 2, 0)]
    with pytest.raises(DataError, match=r"b\.jsonl: all 1 prompts"):
        load(a, write(tmp_path / "b.jsonl", {"prompt": "b" * 50, "answer": "1"}), max_prompt_tokens=30)


def test_verifiers_of_the_run_take_the_place_of_the_rows(load, tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", {"messages": CHAT, "ground_truth": "7", "dataset": "gsm8k"})
    [example] = load(path, verifiers=("math", "format")).examples
    assert example.checks == (Check("math", "7"), Check("format", "7"))


def test_several_files_in_order(load, tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1"})
    b = write(tmp_path / "b.parquet", {"prompt": "b", "answer": "2"})
    prompts = load(a, b)
    assert [(e.index, e.checks[0].ground_truth, e.data_source) for e in prompts.examples] == [
        (0, "1", "a"),
        (1, "2", "b"),
    ]
    assert prompts.fingerprint == load(a, b).fingerprint != load(b, a).fingerprint


@pytest.mark.skipif(not GSM8K.is_file(), reason="OLMORL_TEST_GSM8K names no gsm8k_train.jsonl")
def test_gsm8k_whole(load) -> None:
    start = time.perf_counter()
    prompts = load(GSM8K, max_prompt_tokens=5000)
    assert time.perf_counter() - start < 10
    assert len(prompts) == 7473
    assert all(
        str(e.checks[0].ground_truth).replace(",", "").lstrip("-").replace(".", "").isdigit() for e in prompts.examples
    )
