"""A large cluster is simulated as a part of it: what that costs in truth."""

import pytest

from olmorl.planner.costs import EngineCost, LearnerCost, SyncCost, device
from olmorl.planner.load import Load, lognormal_lengths
from olmorl.planner.plan import SIMULATED_WORKERS, Question, plans, setup_of
from olmorl.planner.setup import Setup
from olmorl.planner.shape import SHAPES
from olmorl.planner.simulation import Simulation


def question(gpus: int, prompts_per_step: int) -> Question:
    shape, h100 = SHAPES["olmo3-7b"], device("h100")
    run = Setup(
        load=Load(lengths=lognormal_lengths(14_628, 32_768), prompt_tokens=1024, zero_variance=0.3),
        engine=EngineCost(shape=shape, device=h100), learner=LearnerCost(shape=shape, device=h100, ranks=1),
        sync=SyncCost(shape=shape), inference_workers=1, prompts_per_step=prompts_per_step, samples_per_prompt=8,
        max_num_seqs=1, kv_cache_tokens=1, async_steps=2,
    )  # fmt: skip
    return Question(run=run, num_devices=gpus, longest=1024 + 32_768)


@pytest.mark.soak
def test_half_of_64_engines_tells_what_all_do() -> None:
    found = []
    for most in (64, SIMULATED_WORKERS):
        setup, scale = setup_of(question(80, 64), 64, 1, 24, most=most)
        assert setup.inference_workers == most and scale == 64 / most
        found.append((Simulation(setup).run(4, warm_up=3), scale))
    (whole, _), (part, scale) = found
    assert part.tokens_per_second * scale == pytest.approx(whole.tokens_per_second, rel=0.05)
    assert part.trained_tokens_per_second * scale == pytest.approx(whole.trained_tokens_per_second, rel=0.1)
    assert part.learner_wait_share == pytest.approx(whole.learner_wait_share, abs=0.05)


@pytest.mark.soak
def test_ten_thousand_devices_are_planned_in_minutes() -> None:
    """Five minutes are the test's own limit."""
    found = plans(question(10_000, 5_760))
    assert found[0].inference_gpus + found[0].learner_gpus == 10_000
    assert found[0].trained_tokens_per_second > 1e6
