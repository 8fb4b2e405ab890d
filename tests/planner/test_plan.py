"""Plans: what a config says is planned, what cannot be is told, and more of anything never makes a run slower."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from olmorl.config.load import load_config
from olmorl.contract.errors import ConfigError
from olmorl.planner.plan import Question, candidates, plans, sensitivity, setup_of, simulate
from olmorl.planner.question import question_of
from olmorl.planner.split import given

CONFIG = str(Path(__file__).parents[2] / "configs" / "qwen3_8b_8gpus.toml")
SHORT = (
    "rollout.max_prompt_tokens=256", "rollout.max_response_tokens=512", "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
)  # fmt: skip


def asked(*settings: str, gpus: int = 8, **options: object) -> Question:
    return question_of(load_config(CONFIG, [*SHORT, *settings]), num_devices=gpus, device_name="h100", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "slower",
    ["sync.mode=drain", "inference.batching=static", "optim.epochs=4", "optim.mini_batches=2", "loss.kl_beta=0.1"],
)
def test_what_a_config_says_is_planned(slower: str) -> None:
    plan, other = (simulate(asked(*settings), 4, 1, 16) for settings in ((), (slower,)))
    assert other.step_seconds > plan.step_seconds


def test_a_measured_learner_takes_what_was_measured(tmp_path: Path) -> None:
    """No second pass is added for checkpointing, and what a step costs beside its tokens is the measured one."""
    bench = {"flops": 8e14, "seconds": 4.25, "short_flops": 2e14, "short_seconds": 1.25, "peak_tflops": 500}
    (tmp_path / "learner.json").write_text(json.dumps(bench))
    learner = asked(learner_bench=tmp_path / "learner.json").run.learner
    flops = 3 * learner.shape.flops(40, 40 * 41 / 2, drawn=20)
    assert learner.train_seconds(20, [[20]]) == pytest.approx(0.25 + flops / 2e14)


@pytest.mark.parametrize(("length", "slots"), [(1024, 64), (6000, 8)])
def test_a_window_that_nothing_fills_takes_no_memory(length: int, slots: int) -> None:
    """OLMo 3 7B: with short sequences its windows of 4,096 for each slot were more than the whole device."""
    question = asked(
        "model.path=allenai/Olmo-3-7B-Think", "rollout.prompts_per_step=64", f"rollout.max_response_tokens={length}"
    )
    fitting = [candidate for candidate in candidates(question) if candidate[2] >= slots]
    assert fitting
    engine = question.run.engine
    assert (engine.kv_tokens(1) == int(engine.kv_room())) == (question.longest <= 4096), "without a window all see all"
    plan = simulate(question, *fitting[-1], 2, workers=1)
    assert plan.trained_tokens_per_second > 0 and plan.kv_cache_tokens >= question.longest


def test_a_model_is_cut_only_by_what_divides_its_heads() -> None:
    """SmolLM2 135M has 9; no engine of 2 would start."""
    assert {degree for _, degree, _ in candidates(asked(shape="smollm2-135m"))} == {1}
    assert {degree for _, degree, _ in candidates(asked(shape="qwen2.5-7b"))} == {1, 2}


def test_memory_that_holds_no_sample_is_told() -> None:
    config = load_config(CONFIG, [*SHORT, "inference.kv_cache_tokens=256"])
    with pytest.raises(ConfigError, match="more than all the 256 tokens of KV"):
        given(config, question_of(config, num_devices=None, device_name="h100"))
    nowhere = [*SHORT, "model.path=Qwen/Qwen3-32B", "inference.gpu_share=0.5", "learner.gpu_share=0.5"]
    config = load_config(
        CONFIG, [*nowhere, "inference.workers=1", "learner.workers=1", "inference.kv_cache_tokens=auto"]
    )
    with pytest.raises(ConfigError, match="more than all the 0 tokens of KV"):
        given(config, question_of(config, num_devices=None, device_name="h100"))


def test_a_plan_that_trains_nothing_has_no_price() -> None:
    question = asked("rollout.active_sampling=false", "rollout.prompts_per_step=1", zero_variance=0.99)
    plan = simulate(question, 4, 1, 4, 2)
    assert plan.trained_tokens_per_second == 0 and plan.cost_per_million_trained_tokens is None
    with pytest.raises(ConfigError, match="no group with signal is trained"):
        sensitivity(question, plan)


def test_a_price_by_hand() -> None:
    """8 H100 at 2.5 dollars an hour."""
    plan = simulate(asked(), 4, 1, 16)
    hours = 1e6 / plan.trained_tokens_per_second / 3600
    assert plan.cost_per_million_trained_tokens == pytest.approx(8 * 2.5 * hours)
    assert sum(plan.staleness) == pytest.approx(1) and len(plan.staleness) == plan.staleness_max + 1
    assert sum(lag * share for lag, share in enumerate(plan.staleness)) == pytest.approx(plan.staleness_mean)


@pytest.mark.parametrize(("workers", "prompts"), [(48, 2), (48, 8), (56, 32), (1000, 7)])
def test_a_part_of_a_cluster_has_its_proportions(workers: int, prompts: int) -> None:
    question = asked(f"rollout.prompts_per_step={prompts}", gpus=workers + 8)
    setup, scale = setup_of(question, workers, 1, 4, most=32)
    assert setup.prompts_per_step * scale == pytest.approx(prompts)
    assert setup.inference_workers * scale == pytest.approx(workers, rel=0.02)


def test_more_devices_and_faster_memory_never_slow_a_run_down() -> None:
    rates = [plans(asked(gpus=gpus), steps=12)[0].trained_tokens_per_second for gpus in (4, 6, 8, 12)]
    assert all(more > 0.98 * fewer for fewer, more in pairwise(rates))
    question, rates = asked(), []
    for factor in (0.5, 1, 2, 4):
        engine = question.run.engine
        faster = replace(engine, device=replace(engine.device, bandwidth=factor * engine.device.bandwidth))
        changed = replace(question, run=replace(question.run, engine=faster))
        rates.append(simulate(changed, 2, 1, 16, 12).trained_tokens_per_second)
    assert all(more > 0.98 * fewer for fewer, more in pairwise(rates))
