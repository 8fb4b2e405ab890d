"""The simulated run against what must hold of any run, and against itself without its short cuts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.scheduler import Scheduler
from olmorl.planner.costs import DEVICES, Device, EngineCost, StepCurve
from olmorl.planner.events import Clock
from olmorl.planner.load import Load, lognormal_lengths
from olmorl.planner.setup import Setup
from olmorl.planner.shape import SHAPES, ModelShape
from olmorl.planner.sim_engine import SimEngine
from olmorl.planner.simulation import Simulation

MakeSetup = Callable[..., Setup]
FREE_ATTENTION = EngineCost(
    shape=ModelShape(
        name="no attention", num_layers=4, hidden_size=64, intermediate_size=128, num_heads=0, num_kv_heads=0,
        head_dim=0, vocab_size=512, tied=True,
    ),
    device=Device(name="small", flops=1e9, bandwidth=1e9, memory=1e9),
)  # fmt: skip


@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.lists(st.integers(1, 60), min_size=1, max_size=5)), min_size=1, max_size=8
    ),
    st.lists(st.floats(0, 0.5), max_size=3),
    st.sampled_from([256, 640]),
)
@settings(max_examples=60, deadline=None)
def test_leaping_changes_nothing(
    requests: list[tuple[float, list[int]]], updates: list[float], kv_cache_tokens: int
) -> None:
    """Step by step or in leaps: the same samples end in the same order after as many steps, at the same times but for
    the cost of attention, which a leap takes from its middle. (Here attention costs nothing, so they are the same.)"""
    leapt = ends(requests, updates, kv_cache_tokens, leaps=True)
    stepped = ends(requests, updates, kv_cache_tokens, leaps=False)
    assert [name for _, name in leapt[0]] == [name for _, name in stepped[0]]
    assert [time for time, _ in leapt[0]] == pytest.approx([time for time, _ in stepped[0]])
    for total in ("steps", "output_tokens", "computed_tokens", "preemptions", "slot_steps", "live_batch_sum"):
        assert getattr(leapt[1], total) == getattr(stepped[1], total), total
    assert leapt[1].busy_seconds == pytest.approx(stepped[1].busy_seconds)


def ends(requests: Any, updates: Any, kv_cache_tokens: int, *, leaps: bool) -> tuple[list[tuple[float, Any]], Any]:
    class Stepwise(Scheduler):
        def steps_until_change(self) -> int:
            return super().steps_until_change() if leaps else 0

    clock, ended = Clock(), []
    engine = SimEngine(
        Stepwise(kv_cache_tokens // 16, block_size=16, max_num_seqs=6, max_tokens_per_step=32, prefix_caching=False),
        FREE_ATTENTION,
        clock,
        on_finished=lambda tag, sequence: ended.append((clock.now, (tag, sequence.sample_index))),
    )
    for number, (time, lengths) in enumerate(requests):
        clock.at(time, lambda n=number, ls=lengths: engine.submit(n, 20, ls))
    for version, time in enumerate(sorted(updates), start=1):
        clock.at(time, lambda v=version: engine.update(v, stall=0.01))
    while clock.step():
        pass
    assert engine.in_flight == 0 and len(ended) == sum(len(lengths) for _, lengths in requests)
    assert engine.scheduler.allocator.num_free == kv_cache_tokens // 16, "blocks leaked"
    return ended, engine.totals


@pytest.mark.parametrize("mode", ["inflight", "pause", "drain"])
@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("async_steps", [0, 1, 3])
def test_the_books_of_a_run_close(make_setup: MakeSetup, mode: str, active: bool, async_steps: int) -> None:
    setup = make_setup(sync_mode=mode, active_sampling=active, async_steps=async_steps)
    outcome = Simulation(setup).run(12, warm_up=3)
    assert outcome.staleness_max <= 2 * async_steps
    if active:
        assert len(outcome.lags) == 12 * 4 * 4, "every batch is full"
    assert outcome.trained_tokens_per_second < outcome.tokens_per_second * 1.2
    assert 0 <= outcome.learner_wait_share < 1 and 0 < outcome.mbu < 1 and outcome.preemption_share == 0
    assert outcome.step_seconds >= outcome.train_seconds


def test_equal_settings_give_equal_runs(make_setup: MakeSetup) -> None:
    assert Simulation(make_setup()).run(8) == Simulation(make_setup()).run(8)
    assert Simulation(make_setup()).run(8) != Simulation(make_setup(seed=2)).run(8)


def test_each_switch_of_the_ablation_helps(make_setup: MakeSetup) -> None:
    fast_learner = replace(make_setup().learner, ranks=16, step_overhead=0.01)  # rollouts are the bill
    baseline: dict[str, Any] = {
        "learner": fast_learner, "batching": "static",
        "active_sampling": False, "oversampling": 3, "async_steps": 0, "sync_mode": "drain",
    }  # fmt: skip
    rates = []
    for switch in (
        {},
        {"batching": "continuous"},
        {"active_sampling": True},
        {"async_steps": 2},
        {"sync_mode": "inflight"},
    ):
        baseline |= switch
        rates.append(Simulation(make_setup(**baseline)).run(20, warm_up=2).trained_tokens_per_second)
    assert rates == sorted(rates) and rates[-1] > 2 * rates[0]


def test_static_batching_wastes_what_the_lengths_say(make_setup: MakeSetup) -> None:
    """OLMo 3's mean and longest: 1 - mean/max of the slots, in batches of which one runs to the limit."""
    load = Load(lengths=lognormal_lengths(14628 / 128, 32768 // 128), prompt_tokens=8)
    setup = make_setup(
        load=load, batching="static", max_num_seqs=32, inference_workers=1, prompts_per_step=16,
        samples_per_prompt=8, async_steps=0, sync_mode="drain", kv_cache_tokens=1 << 16,
    )  # fmt: skip
    assert Simulation(setup).run(12).slot_waste == pytest.approx(0.54, abs=0.02)


def test_a_small_pool_preempts_and_still_ends(make_setup: MakeSetup) -> None:
    outcome = Simulation(make_setup(kv_cache_tokens=256)).run(6)
    assert outcome.preemption_share > 0
    assert outcome.tokens_per_second < Simulation(make_setup()).run(6).tokens_per_second


def test_stalls_are_those_of_the_mode(make_setup: MakeSetup) -> None:
    stalls = {
        mode: Simulation(make_setup(sync_mode=mode, async_steps=2)).run(10).stall_seconds
        for mode in ("inflight", "pause", "drain")
    }
    sync = make_setup().sync
    assert stalls["inflight"] == pytest.approx(sync.swap)
    assert stalls["pause"] == pytest.approx(sync.swap + sync.transfer_seconds)
    assert stalls["drain"] > stalls["pause"], "engines that run empty wait for the last"


def test_lengths_have_the_mean_asked_for() -> None:
    lengths = lognormal_lengths(14628, 32768)
    assert sum(lengths) / len(lengths) == pytest.approx(14628, rel=1e-3) and max(lengths) == 32768 and min(lengths) >= 1


def test_costs_by_hand() -> None:
    cost = EngineCost(
        shape=SHAPES["qwen2.5-7b"], device=DEVICES["h100"], compute_efficiency=1, bandwidth_efficiency=1,
        step_overhead=0, sequence_overhead=0,
    )  # fmt: skip
    assert cost.shape.num_parameters == pytest.approx(7.6156e9, rel=1e-4) and cost.shape.kv_bytes_per_token == 57_344
    seconds = cost.step_seconds(tokens=16, sequences=16, pairs=16 * 8000, reads=16 * 8000)
    assert seconds == pytest.approx((7.0706e9 * 2 + 16 * 8000 * 57_344) / 3.35e12, rel=1e-4)
    assert cost.step_seconds(tokens=2048, sequences=1, pairs=0, reads=0) == pytest.approx(
        2 * 7.0706e9 * 2048 / 990e12, rel=1e-3
    )


def test_two_samples_in_one_slot_by_hand(make_setup: MakeSetup) -> None:
    """Steps of half a second: each sample draws 3 tokens in 3 steps, one behind the other. Then 10 s of training, 1 s
    for the snapshot, 2 s to send it, and the swap; synchronous, so that a step is their sum."""
    setup = make_setup()
    half = StepCurve(tokens=(1,), at_tokens=(0.5,), a_pair=0.0)
    setup = make_setup(
        load=Load(lengths=[3], prompt_tokens=5), engine=replace(setup.engine, measured=half),
        learner=replace(setup.learner, step_overhead=10.0, passes=0.0),
        sync=replace(setup.sync, bandwidth=float("inf"), latency=2.0, snapshot=1.0, swap=0.25),
        inference_workers=1, prompts_per_step=1, samples_per_prompt=2, max_num_seqs=1, async_steps=0,
    )  # fmt: skip
    found = Simulation(setup).run(2, warm_up=1)
    period = 0.25 + 6 * 0.5 + 10 + 1 + 2
    assert found.step_seconds == pytest.approx(period)
    assert found.tokens_per_second == pytest.approx(6 / period) == found.trained_tokens_per_second
    assert found.learner_wait_share == pytest.approx(1 - 11 / period)
    assert (found.stall_seconds, found.live_batch, found.slot_waste, found.lags) == (0.25, 1.0, 0.0, [0] * 4)


@given(
    st.integers(0, 2), st.sampled_from(["inflight", "pause", "drain"]), st.booleans(), st.integers(1, 3),
    st.integers(1, 12), st.floats(0, 0.8), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_token_is_trained_wasted_or_in_hand(
    make_setup: MakeSetup,
    async_steps: int,
    mode: str,
    active: bool,
    oversampling: int,
    slots: int,
    zero: float,
    seed: int,
) -> None:
    load = Load(lengths=[1, 3, 17, 60], prompt_tokens=12, zero_variance=zero)
    setup = make_setup(
        load=load, async_steps=async_steps, sync_mode=mode, active_sampling=active, max_num_seqs=slots, seed=seed,
        oversampling=oversampling, inference_workers=2, prompts_per_step=2, samples_per_prompt=3, kv_cache_tokens=1024,
    )  # fmt: skip
    simulation = Simulation(setup)
    simulation.run(4)
    admitted = [load.group(number, 3, seed=seed) for number in range(simulation._next_number)]
    in_hand = simulation._drawn
    gone = [group for order, group in enumerate(admitted) if order not in in_hand]
    trained = simulation._trained_tokens
    wasted = sum(sum(lengths) for lengths, _ in gone) - trained
    assert wasted >= sum(sum(lengths) for lengths, has_signal in gone if not has_signal)
    assert active is False or wasted == sum(sum(lengths) for lengths, has_signal in gone if not has_signal)
    left = sum(engine.in_flight for engine in simulation._engines)
    made = sum(engine.totals.output_tokens for engine in simulation._engines)
    partly = sum(sum(lengths) for lengths, _ in in_hand.values())
    assert trained + wasted <= made <= trained + wasted + partly
    assert left <= 3 * len(in_hand)
