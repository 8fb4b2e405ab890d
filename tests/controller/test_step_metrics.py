"""What a step says of the choice it made among the groups that were offered, and of the time of its engines."""

import time
from dataclasses import replace

import numpy as np
import pytest

from olmorl.contract.generation import RolloutSample
from olmorl.controller.admission import judge
from olmorl.controller.group import Group, ScoredSample
from olmorl.controller.recorder import snapshot_stats
from olmorl.controller.step_metrics import add_engines, add_rollouts, add_selection
from olmorl.data.prompt import Check, Prompt
from olmorl.metrics.bag import MetricBag
from olmorl.metrics.names import is_declared
from olmorl.metrics.utilization import Peak


def group(*rewards: float | None, length: int, overtaken: bool = False) -> Group:
    prompt = Prompt(
        index=0,
        token_ids=np.array([1], np.int32),
        text="",
        checks=(Check("gsm8k", "1"),),
        data_source="s",
        epoch=0,
        position=0,
    )
    samples = [
        ScoredSample(
            sample=RolloutSample(
                request_id="0_0",
                lease=1,
                sample_index=index,
                worker="w",
                token_ids=np.zeros(length, np.int32),
                logprobs=np.zeros(length, np.float32),
                raw_logprobs=np.zeros(length, np.float32),
                version_spans=((0, 0, length),),
                text="",
                finish_reason="stop",
            ),
            reward=reward,
            verdict="timeout" if reward is None else "scored",
        )
        for index, reward in enumerate(rewards)
    ]
    made = Group(prompt=prompt, order=0, admitted_version=0, seed=0, t_admitted=0.0, samples=samples)
    made.has_signal = judge(made, scale=1.0, kind="centered", mask_truncated=False)
    made.overtaken = overtaken
    return made


def test_kept_against_offered() -> None:
    groups = [
        group(1.0, 0.0, 0.0, 0.0, length=10),
        group(1.0, 1.0, 1.0, 0.0, length=30, overtaken=True),
        group(1.0, 1.0, length=2),
        group(0.0, 0.0, length=50),
        group(None, None, length=7),
    ]
    bag = MetricBag()
    add_selection(bag, groups)
    metrics = bag.drain()
    assert all(map(is_declared, metrics)), "a name that is not declared"
    said = {name.removeprefix("active_sampling/"): round(value, 6) for name, value in metrics.items()}
    assert (said["offered_groups"], said["kept_groups"]) == (5, 2)
    assert said["kept_length_mean"] == 20 and said["offered_length_mean"] == round((160 + 4 + 100 + 14) / 14, 6)
    offered = [said[f"offered_pass_rate/{bin}"] for bin in ("none", "low", "high", "all")]
    kept = [said[f"kept_pass_rate/{bin}"] for bin in ("none", "low", "high", "all")]
    assert offered == [0.25] * 4 and kept == [0, 0.5, 0.5, 0]
    assert said["overtaken_fraction"] == 0.5
    assert (said["overtaken_length_mean"], said["on_time_length_mean"]) == (30, 10)


def test_rewards_and_lengths_are_of_all_that_met_its_fate() -> None:
    groups = [
        group(1.0, 0.0, 0.0, 0.0, length=10),
        group(1.0, 1.0, 1.0, 0.0, length=30),
        group(1.0, 1.0, length=2),
        group(0.5, 0.5, length=50),
        group(None, None, length=7),
    ]
    bag = MetricBag()
    add_rollouts(bag, groups, version=3)
    metrics = bag.drain()
    assert all(map(is_declared, metrics)), "a name that is not declared"
    assert metrics["reward/mean"] == metrics["reward/s/mean"] == 7 / 12 and metrics["reward/solve_rate"] == 6 / 12
    assert metrics["reward/std"] == np.std([1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0.5, 0.5])
    assert metrics["reward/unscored_fraction"] == 2 / 14 and metrics["reward/zero_variance_fraction"] == 3 / 5
    assert (metrics["verdict/timeout"], metrics["verdict/error"]) == (2, 0)
    assert metrics["rollout/response_length_mean"] == (40 + 120 + 4 + 100 + 14) / 14
    assert metrics["rollout/response_length_max"] == 50 and metrics["rollout/truncated_fraction"] == 0
    assert metrics["off_policy/token_age_mean"] == 3, "trained by version 3, drawn by version 0"
    add_rollouts(bag, [], version=3)
    assert {name: value for name, value in bag.drain().items() if value} == {}


def test_a_source_whose_name_is_a_path_has_one_metric_of_its_own() -> None:
    """Named as a Hugging Face data set is: a slash in it would make names that nobody declared."""
    one, other = group(1.0, 0.0, length=10), group(1.0, 1.0, length=10)
    one.prompt = replace(one.prompt, data_source="openai/gsm8k")
    bag = MetricBag()
    add_rollouts(bag, [one, other], version=0)
    metrics = bag.drain()
    assert metrics["reward/openai_gsm8k/mean"] == 0.5 and all(map(is_declared, metrics))


def test_seconds_of_an_engine_are_counted_once_however_late_its_counters_come() -> None:
    """The first row is made 2 s after the counters came, 20 s into the run; the second 10 s later, with fresh ones."""
    now = time.time()
    first = snapshot_stats({"inference-0": {"wall_seconds": 5.0, "as_of": now - 2}})
    second = snapshot_stats({"inference-0": {"wall_seconds": 17.0, "as_of": now}})
    spent = []
    for before, after, since_last in (({}, first, 20.0), (first, second, 10.0)):
        bag = MetricBag()
        add_engines(bag, before, after, peak=Peak(flops=1e9, bandwidth=1e9), seconds=since_last, since_last=since_last)
        spent.append(sum(value for name, value in bag.drain().items() if name.startswith("engine_time/")))
    assert spent == pytest.approx([18, 12], abs=0.1)
