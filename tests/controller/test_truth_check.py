"""Ground truths that no completion can be judged by are found before anything starts, with their lines."""

import asyncio
import json
import logging
import re
import time
from pathlib import Path

import numpy as np
import pytest

from olmorl.config.data_sections import RewardSection
from olmorl.contract.errors import DataError
from olmorl.controller.scoring import Scorer
from olmorl.controller.truth_check import check_truths
from olmorl.data.prompt import Check, EncodedExample
from olmorl.rewards.verifier import BUILTIN


def example(verifier: str, truth: object, *, line: int = 1, source: str = "a") -> EncodedExample:
    return EncodedExample(
        index=line,
        token_ids=np.array([1], np.int32),
        text="q",
        checks=(Check(verifier, truth),),
        data_source=source,
        place=f"{source}.jsonl:{line}",
    )


def check(*examples: EncodedExample, section: RewardSection | None = None, seconds: float | None = None) -> None:
    async def main() -> None:
        section_ = section or RewardSection(judge_url="http://localhost:9/v1", judge_model="m")
        remap = section_.remap
        names = [remap.get(c.verifier or "", c.verifier or "") for e in examples for c in e.checks]
        scorer = await Scorer.start(section_, verifiers=names)
        try:
            if seconds is None:
                await scorer.check_truths(examples)
            else:
                await check_truths(scorer._pool, examples, remap=remap, seconds=seconds)
        finally:
            await scorer.close()

    asyncio.run(main())


GOOD_AND_BAD: dict[str, tuple[list[object], list[object]]] = {
    "gsm8k": (["72", "#### 72", 72, 7.5, ["72"]], ["no number", "", {"answer": 72}, ["1", "2"], True]),
    "math": (["\\frac{1}{2}", "7", ["7", "8"]], ["", {"answer": 7}, [], True]),
    "string_match": (["yes", 7, ["a", "b"]], ["", {}, [], [{}]]),
    "string_f1": (["some words"], ["", "the", {}]),
    "puzzle": (["a b"], ["", {}]),
    "regex": (["^a+$"], ["(", 7, None]),
    "max_length": ([100, "100"], ["long", -1, [1]]),
    "ifeval": (
        [{"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}],
        [
            {"instruction_id": ["punctuation:no_such"], "kwargs": [None]},
            {"instruction_id": ["keywords:existence"], "kwargs": [{"no_such": 1}]},
            "text",
        ],
    ),
    "code": (["assert f(1) == 2", ["assert f(1) == 2"]], ["", [], [1], {"a": 1}]),
    "code_stdio": ([[{"input": "1", "output": "2"}]], ["text", [], [{"input": "1"}]]),
    "judge": (["a reference", None], []),
    "general-quality_ref": (["a reference"], ["", None]),
    "rubric": ([{"rubrics": [{"description": "d"}]}], ["text", {"rubrics": []}]),
    "format": (["anything", None], []),
}


def test_what_each_verifier_can_be_asked() -> None:
    """No judge is asked anything: there is none at that address."""
    good = [example(name, truth) for name, (truths, _) in GOOD_AND_BAD.items() for truth in truths]
    check(*good)
    bad = [(name, truth) for name, (_, truths) in GOOD_AND_BAD.items() for truth in truths]
    with pytest.raises(DataError) as refused:
        check(*good, *(example(name, truth, source=f"{name}-{i}") for i, (name, truth) in enumerate(bad)))
    assert str(refused.value).startswith(f"{len(bad)} of {len(good) + len(bad)} ground truths")


def test_a_bad_row_is_told_with_its_line_and_what_to_do() -> None:
    rows = [example("gsm8k", str(n), line=n) for n in range(1, 2000)]
    rows[16], rows[999] = example("gsm8k", "seventeen", line=17), example("gsm8k", {"a": 1}, line=1000)
    with pytest.raises(DataError) as refused:
        check(*rows)
    assert str(refused.value).splitlines() == [
        "2 of 1,999 ground truths cannot be judged by their verifier:",
        "a.jsonl:17: verifier 'gsm8k': the ground truth 'seventeen' holds no number",
        "a.jsonl:1000: verifier 'gsm8k': the ground truth {'a': 1} holds no number",
        "Mend or remove these rows, or name another verifier: reward.verifier, or `verifier` of the data source",
    ]


def test_many_bad_rows_are_counted() -> None:
    with pytest.raises(DataError) as refused:
        check(*(example("gsm8k", "none", line=n) for n in range(1, 1001)))
    assert "1,000 of 1,000" in str(refused.value) and "and 997 more" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 6


def test_the_verifier_that_takes_the_place_of_anothers_is_asked() -> None:
    row = example("gsm8k", "a word")
    check(row, section=RewardSection(remap={"gsm8k": "string_match"}))


def test_a_slow_verifier_does_not_hold_up_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked as long as there is time. That a verifier fails on an empty completion is no fault of the data."""
    (tmp_path / "slow_verifier.py").write_text(
        "import time\n"
        "def judge(completion, truth, prompt):\n"
        "    assert completion, 'of no use'\n"
        "def slow(completion, truth, prompt):\n"
        "    time.sleep(0 if truth < 3 else 3600)\n"
    )
    monkeypatch.chdir(tmp_path)
    check(example("slow_verifier:judge", 1))
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        check(*(example("slow_verifier:slow", n, line=n) for n in range(100)), seconds=1.0)
    assert time.monotonic() - started < 30
    assert re.search("checked [0-3] of 100 ground truths", caplog.text)


def test_the_first_of_every_source_come_first() -> None:
    """So a source behind a large one is looked at too, when there is no time for all."""
    rows = [example("gsm8k", "x", line=n) for n in range(1, 600)] + [example("gsm8k", "x", source="b")]
    with pytest.raises(DataError) as refused:
        check(*rows)
    assert [line.partition(": ")[0] for line in str(refused.value).splitlines()[1:4]] == [
        "a.jsonl:1",
        "b.jsonl:1",
        "a.jsonl:2",
    ]


def test_procedural_tasks_pass() -> None:
    gym = pytest.importorskip("reasoning_gym")
    tasks = ("chain_sum", "ransom_note", "gcd", "word_sorting")
    rows = [json.loads(json.dumps(gym.create_dataset(task, size=1, seed=0)[0])) for task in tasks]
    check(*(example("reasoning_gym", row) for row in rows))
    with pytest.raises(DataError, match="no entry of reasoning_gym"):
        check(example("reasoning_gym", "7"))


def test_every_verifier_stands_in_the_table() -> None:
    others = {"flan", "string_matcher", "re_search"}  # as string_match
    others |= {"strict_math", "ifeval_old", "ifeval_strict", "re_search_f1", "up_to_max_length", "passthrough"}
    assert set(BUILTIN) <= set(GOOD_AND_BAD) | others | {"reasoning_gym"}
