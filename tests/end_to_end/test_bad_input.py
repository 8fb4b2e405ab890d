"""What a user gets wrong is one message, exit code 2, before any worker starts, and leaves no run in the way."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'
SECONDS = 30.0  # no Ray, no worker: a few seconds on a machine at rest

Prepare = Callable[[Path, Path], list[str]]  # folder to write in, the quickstart's model -> overrides


def model_of_another_family(folder: Path, model: Path) -> list[str]:
    shutil.copytree(model, folder / "gpt2")
    (folder / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return ["model.path=gpt2"]


def data(text: str | bytes) -> Prepare:
    def write(folder: Path, model: Path) -> list[str]:
        (folder / "mine.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["data.train=mine.jsonl"]

    return write


def broken_verifier(folder: Path, model: Path) -> list[str]:
    (folder / "my_verifier.py").write_text("def judge(completion, truth, prompt): return 1.0\n")
    return ["reward.verifier=my_verifier:jugde"]


def verifier_that_cannot_be_imported(folder: Path, model: Path) -> list[str]:
    (folder / "my_verifier.py").write_text("import json\nlimit = json.loads('3')['limit']\n")
    return ["reward.verifier=my_verifier:judge"]


def hub_model_of_another_family(folder: Path, model: Path) -> list[str]:
    """As a download leaves it in the cache."""
    snapshot = folder / "hub" / "models--nobody--gpt2" / "snapshots" / "0a1b"
    shutil.copytree(model, snapshot)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0a1b")
    return ["model.path=nobody/gpt2"]


def lengths_of_one(folder: Path, model: Path) -> list[str]:
    (folder / "mine.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "long": [3]}\n')
    return ['data.train={path="mine.jsonl", lengths_column="long"}']


def overrides(*texts: str) -> Prepare:
    return lambda folder, model: list(texts)


CASES: dict[str, tuple[Prepare, str]] = {
    "unknown key": (overrides("rollout.prompts_per_stop=3"), "prompts_per_step"),
    "missing model": (overrides("model.path=./no/such/model"), "no/such/model: no such model folder"),
    "hub model out of reach": (overrides("model.path=nobody/nothing"), "not to be had from the hub"),
    "unsupported family": (model_of_another_family, "'gpt2'; supported are llama, olmo2, olmo3, qwen2, qwen3"),
    "unsupported family on the hub": (hub_model_of_another_family, "'gpt2'; supported are llama, olmo2"),
    "broken JSON": (data(GOOD + '{"prompt": "1+1=",\n'), "mine.jsonl:2: broken JSON at column"),
    "not UTF-8": (data(GOOD.encode() + b'{"prompt": "\xff", "answer": "2"}\n'), "mine.jsonl:2: not UTF-8 (byte 13"),
    "ground truth of the wrong type": (
        data(GOOD + '{"prompt": "1+1=", "answer": {"value": 2}}\n'),
        "mine.jsonl:2: verifier 'gsm8k': the ground truth {'value': 2} holds no number",
    ),
    "missing data of an evaluation": (overrides("eval.data=nowhere.jsonl"), "nowhere.jsonl: no such data file"),
    "missing data": (overrides("data.train=nowhere.jsonl"), "nowhere.jsonl: no such data file"),
    "empty data": (data(""), "mine.jsonl: the file holds no rows"),
    "missing columns": (data('{"text": "1+1="}\n'), "mine.jsonl:1"),
    "prompts all too long": (overrides("rollout.max_prompt_tokens=3"), "raise rollout.max_prompt_tokens"),
    "impossible placement": (overrides("inference.device=cuda", "inference.workers=2"), "2 missing"),
    "unknown verifier": (overrides("reward.verifier=gsm9k"), "did you mean 'gsm8k'"),
    "weight of no row's verifier": (
        overrides("reward.weights={math=2.0}"),
        "reward.weights: no row is judged by 'math'; the verifiers are gsm8k",
    ),
    "remap of what no row names": (
        overrides('reward.remap={GSM8K="math"}'),
        "reward.remap: no row names 'GSM8K'; they name gsm8k",
    ),
    "lengths of another number of samples": (
        lengths_of_one,
        "mine.jsonl:1: the row says how long 1 responses are, but ",
    ),
    "broken verifier": (broken_verifier, "did you mean 'judge'"),
    "verifier that cannot be imported": (
        verifier_that_cannot_be_imported,
        "'my_verifier:judge' cannot be loaded: TypeError: 'int' object is not subscriptable",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_message_exit_code_2_and_nothing_started(case: str, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_CACHE", str(command.folder / "hub"))
    prepare, says = CASES[case]
    settings = prepare(command.folder, command.config.parent / "quickstart" / "model")
    started = time.monotonic()
    out, err = command.run("run.steps=1", *settings, code=2)
    assert time.monotonic() - started < SECONDS
    assert says in err and err.startswith("error: ") and "Traceback" not in err, err
    assert len(err.splitlines()) <= 3 and out == "", err
    assert not command.directory.exists(), "it is in the way of the next try"
    command.assert_nothing_left()


def test_prompts_that_are_too_long_are_counted_and_said(command: Any) -> None:
    """Some are: the rest is trained on; here the run is stopped by its impossible placement, to start nothing."""
    _, err = command.run("rollout.max_prompt_tokens=12", "inference.device=cuda", code=2)
    assert "of 4000 prompts are longer than 12 tokens and are left out" in err
