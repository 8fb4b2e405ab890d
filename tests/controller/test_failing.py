"""Which verifiers end a run, and what is said then."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.config.data_sections import RewardSection
from olmorl.controller.failing import LEAST_GROUPS, FailingVerifiers, failing_set
from olmorl.controller.group import Group, ScoredSample
from olmorl.data.prompt import Check, Prompt

BATCH = LEAST_GROUPS + 4


def group(*verdicts: str, source: str = "sums", aborted: int = 0, **also: Any) -> Group:
    """`aborted` samples more were given up by their engine, which is no verdict."""
    prompt = Prompt(
        index=0,
        token_ids=np.array([1], np.int32),
        text="",
        checks=(Check("mine:judge", "7"),),
        data_source=source,
        place="sums.jsonl:3",
        epoch=0,
        position=0,
        **also,
    )
    samples = [scored(verdict, "stop") for verdict in verdicts] + [scored("error", "abort") for _ in range(aborted)]
    return Group(prompt=prompt, order=0, admitted_version=0, seed=0, t_admitted=0.0, samples=samples)


def scored(verdict: Any, finish_reason: str) -> ScoredSample:
    sample: Any = SimpleNamespace(finish_reason=finish_reason)
    detail = "ValueError: no (/mine.py:7)" if finish_reason == "stop" else "NaN logits"
    return ScoredSample(sample=sample, reward=1.0 if verdict == "scored" else None, verdict=verdict, detail=detail)


def trouble(groups: Sequence[Group], *, section: RewardSection | None = None, batch: int = BATCH) -> str | None:
    failing = FailingVerifiers(section or RewardSection(), groups_per_batch=batch)
    for one in groups:
        failing.judged(one)
    return failing.trouble


def test_a_batch_of_nothing_but_errors_is_told_with_verifier_place_and_mend() -> None:
    bad = group("error", "error")
    assert trouble([bad] * (BATCH - 1)) is None
    said = trouble([bad] * BATCH, section=RewardSection(verifier=("mine:judge",)))
    assert said is not None and said.startswith(f"the verifier fails: all samples of the first {BATCH} groups of data ")
    assert "mine:judge (reward.verifier), asked about sums.jsonl:3: ValueError: no (/mine.py:7)" in said
    assert "olmorl doctor" in said and "driver.log" in said
    by_row = trouble([group("error", aborted=1, environment="mine:Game")] * BATCH)
    assert by_row is not None and "reward.verifier" not in by_row and "NaN" not in by_row
    assert "mine:Game (environment), mine:judge, asked" in by_row


@pytest.mark.parametrize("verdict", ["scored", "timeout", "unscorable"])
def test_one_that_has_judged_before_may_fail(verdict: str) -> None:
    """What it asks may be down; and a verdict of another kind is one."""
    assert trouble([group("error", verdict), *[group("error", "error")] * 3 * BATCH]) is None
    assert trouble([*[group("error", "error")] * (BATCH - 1), group(verdict), *[group("error")] * BATCH]) is None


def test_a_source_that_fails_among_others_counts() -> None:
    mixed = [group("scored", "error"), group("error", "error", source="essays")] * BATCH
    said = trouble(mixed)
    assert said is not None and "'essays'" in said and "'sums'" not in said


@given(batch=st.integers(1, 2 * LEAST_GROUPS), groups=st.integers(0, 3 * LEAST_GROUPS))
def test_a_few_bad_rows_are_no_broken_verifier(batch: int, groups: int) -> None:
    assert (trouble([group("error")] * groups, batch=batch) is not None) == (groups >= max(batch, LEAST_GROUPS))


def test_what_an_engine_gave_up_is_no_verdict() -> None:
    assert trouble([group(aborted=2)] * 2 * BATCH) is None
    assert failing_set("held out", [group(aborted=2)], RewardSection()) is None


def test_an_evaluation_set_fails_whole_or_not() -> None:
    bad, good = group("error", aborted=1), group("scored")
    assert failing_set("held out", [bad, good, bad], RewardSection()) is None
    said = failing_set("held out", [group(aborted=1), bad], RewardSection())
    assert said is not None and "all 3 samples of evaluation set 'held out'" in said and "/mine.py:7" in said
