"""The task is a pure function of seed, split and index, and what is committed is what the generator makes."""

import json
import random
import runpy
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from olmorl.quickstart.build import HELD_OUT_SEED, NUM_HELD_OUT, NUM_TRAIN, TRAIN_SEED, write_problems
from olmorl.quickstart.chain_sums import Split, distinct_problems, problem, worked_answer
from olmorl.quickstart.tokenizer import BOS, EOS, build_tokenizer
from olmorl.rewards import score

FOLDER = Path(__file__).parents[2] / "configs" / "quickstart"

seeds, indices = st.integers(0, 2**32), st.integers(0, 10**6)
splits: st.SearchStrategy[Split] = st.sampled_from(["train", "held_out"])


@given(seed=seeds, split=splits, index=indices)
def test_a_problem_is_a_pure_function(seed: int, split: Split, index: int) -> None:
    found = problem(seed, split, index)
    assert found == problem(seed, split, index)
    assert sum(map(int, found.prompt.removesuffix("=").split("+"))) == int(found.ground_truth)


@given(seeds, seeds, indices, indices)
def test_the_splits_never_meet(train_seed: int, held_out_seed: int, train_index: int, held_out_index: int) -> None:
    assert problem(train_seed, "train", train_index) != problem(held_out_seed, "held_out", held_out_index)


def test_distinct_problems_come_once_and_in_order() -> None:
    found = list(islice(distinct_problems(3, "train"), 500))
    assert len(set(found)) == 500
    assert found[0] == problem(3, "train", 0)


@given(seed=seeds, index=indices, give_up=st.sampled_from([0.0, 0.15, 1.0]))
def test_a_worked_answer_is_right_unless_given_up(seed: int, index: int, give_up: float) -> None:
    terms = problem(seed, "train", index).terms
    *steps, result = worked_answer(terms, random.Random(seed), give_up=give_up).split(";")
    for step in steps:
        left, _, right = step.partition("=")
        assert sum(map(int, left.split("+"))) == int(right)
    assert result == steps[-1].partition("=")[2]
    if give_up == 0:
        assert int(result) == sum(terms)
        assert score("gsm8k", completion=";".join([*steps, result]), ground_truth=str(sum(terms))).reward == 1
    if give_up == 1:
        assert len(steps) == 1


@given(seed=seeds, split=splits, index=indices)
def test_the_tokenizer_loses_nothing(seed: int, split: Split, index: int) -> None:
    tokenizer = build_tokenizer()
    found = problem(seed, split, index)
    text = found.prompt + worked_answer(found.terms, random.Random(seed), give_up=0.1)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == BOS + text
    assert len(ids) == 1 + len(text), "one token a character"
    assert tokenizer.encode(text + EOS)[-1] == tokenizer.convert_tokens_to_ids(EOS)


@pytest.mark.parametrize(
    ("split", "seed", "count"), [("train", TRAIN_SEED, NUM_TRAIN), ("held_out", HELD_OUT_SEED, NUM_HELD_OUT)]
)
def test_committed_data_is_what_the_generator_makes(split: Split, seed: int, count: int, tmp_path: Path) -> None:
    write_problems(tmp_path / "made.jsonl", islice(distinct_problems(seed, split), count))
    assert (FOLDER / f"{split}.jsonl").read_text() == (tmp_path / "made.jsonl").read_text()


def test_committed_tokenizer_is_the_one_that_is_built(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((FOLDER / "model" / name).read_text()) == json.loads((tmp_path / name).read_text())
    loaded = PreTrainedTokenizerFast.from_pretrained(FOLDER / "model")
    assert loaded.encode("7+5=") == build_tokenizer().encode("7+5=")


def test_committed_model_is_a_small_weak_policy_that_loads() -> None:
    assert (FOLDER / "model" / "model.safetensors").stat().st_size < 8 << 20
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)
    tokenizer = build_tokenizer()
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = problem(HELD_OUT_SEED, "held_out", 0).prompt
    ids = model.generate(torch.tensor([tokenizer.encode(prompt)]), max_new_tokens=80, do_sample=False)[0]
    answer = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(prompt)
    assert answer.startswith(f"{prompt[0]}+{prompt[2]}="), answer


def test_asking_for_help_makes_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["quickstart", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("olmorl.quickstart", run_name="__main__")
    assert ended.value.code == 0 and "folder" in capsys.readouterr().out and not list(tmp_path.iterdir())
