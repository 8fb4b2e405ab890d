"""Which split of the devices serves a run best: every candidate simulated, the best named, and what it hangs on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from olmorl.contract.errors import ConfigError
from olmorl.planner.costs import Device, EngineCost
from olmorl.planner.load import Load
from olmorl.planner.setup import Setup
from olmorl.planner.shape import ModelShape
from olmorl.planner.simulation import Outcome, Simulation

BLOCK_SIZE = (
    128  # coarser than an engine's: a sequence holds half of one too much, and the simulation is 5 times faster
)
SIMULATED_WORKERS = 32  # more are simulated as so many, with the load scaled down alike
MOST_PARALLEL = 8
DEGREES = 2  # of tensor parallelism that are tried: the smallest that fit
COARSE_WORKERS, COARSE_STEPS = 4, 3  # of the first look at every candidate
FINAL_WORKERS, FINALISTS = 8, 6  # of the second look at the best; the best of these has SIMULATED_WORKERS
STEPS = 6  # simulated behind the warm-up
BYTES_PER_TRAINED_PARAMETER = 16  # bf16 weight and gradient, float32 weight and two moments, less what is freed
ACTIVATION_SHARE = 0.35  # of a learner's memory that activations and buffers need


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned."""

    run: Setup
    """with all that a split leaves as it is; its engine is of one device, its learner of one rank"""
    num_devices: int
    longest: int
    """tokens of a sequence"""
    node_size: int = MOST_PARALLEL
    """devices of a node, the most that one inference worker may have"""
    shared: bool = False
    """one device has both roles"""
    learner_share: float = 1.0
    """memory that a learner may use of a device, of what an engine may: not the same where they share one"""

    @property
    def shape(self) -> ModelShape:
        return self.run.learner.shape

    @property
    def device(self) -> Device:
        return self.run.engine.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    inference_gpus: int
    learner_gpus: int
    tensor_parallel: int
    slots: int
    """samples decoded at once by one worker"""
    kv_cache_tokens: int
    """of a worker"""
    tokens_per_second: float
    trained_tokens_per_second: float
    step_seconds: float
    learner_wait_share: float
    staleness_mean: float
    staleness_max: int
    staleness: list[float]
    """share of the trained samples that are 0, 1, 2, ... versions old"""
    kv_used_share: float
    """of the KV memory, averaged over engine steps"""
    preemption_share: float
    stall_seconds: float
    mbu: float
    cost_per_million_trained_tokens: float | None
    """None where nothing is trained"""


def plans(question: Question, *, steps: int = STEPS) -> list[Plan]:
    """The best first: the most trained tokens a second, all devices being paid for. Raises as `first_look`."""
    return finalists(question, first_look(question), steps=steps)


def first_look(question: Question, *, progress: Callable[[int, int], None] | None = None) -> list[Plan]:
    """All candidates, simulated roughly, the best first.

    Raises:
        ConfigError: the model fits on no split of these devices; says what it needs.
    """
    tried = list(candidates(question))
    if not tried:
        raise ConfigError(_why_nothing_fits(question))
    looked = []
    for number, (inference_gpus, tensor_parallel, slots) in enumerate(tried, start=1):
        looked.append(simulate(question, inference_gpus, tensor_parallel, slots, COARSE_STEPS, workers=COARSE_WORKERS))
        if progress is not None:
            progress(number, len(tried))
    return sorted(looked, key=_rank)


def finalists(question: Question, looked: Sequence[Plan], *, steps: int = STEPS) -> list[Plan]:
    """The best of a first look, simulated again; the best of these as exactly as any."""
    again = sorted((_again(question, plan, steps, workers=FINAL_WORKERS) for plan in looked[:FINALISTS]), key=_rank)
    return [_again(question, again[0], steps, workers=SIMULATED_WORKERS), *again[1:]]


def _again(question: Question, plan: Plan, steps: int, *, workers: int) -> Plan:
    kv = plan.kv_cache_tokens
    return simulate(
        question, plan.inference_gpus, plan.tensor_parallel, plan.slots, steps, workers=workers, kv_cache_tokens=kv
    )


def _rank(plan: Plan) -> float:
    return -plan.trained_tokens_per_second


def sensitivity(question: Question, best: Plan, *, steps: int = STEPS) -> dict[str, float]:
    """Trained tokens a second of the best plan, relative to what it is, when one thing changes."""

    def trained(**changes: Any) -> float:
        changed = replace(question, run=replace(question.run, **changes))
        return _again(changed, best, steps, workers=FINAL_WORKERS).trained_tokens_per_second

    before = trained()
    if not before:
        raise ConfigError("no group with signal is trained in this plan; lower --zero-variance, or draw more groups")

    def again(**changes: Any) -> float:
        return trained(**changes) / before - 1

    run, load = question.run, question.run.load
    assert isinstance(load, Load)
    shorter = replace(load, lengths=[-(-n // 2) for n in load.lengths])
    window = None if run.window is None else max(run.window, run.async_steps + 1)
    return {
        "one more asynchronous step": again(async_steps=run.async_steps + 1, window=window),
        "engine steps 10 % shorter": again(engine=replace(run.engine, slowdown=run.engine.slowdown * 0.9)),
        "responses half as long": again(load=shorter),
        "no group without signal": again(load=replace(load, zero_variance=0.0)),
    }


def explain(question: Question, best: Plan) -> str:
    """One sentence on what bounds the best plan."""
    where = f"{best.inference_gpus} of {question.num_devices} devices generate"
    if question.shared:
        where = "one device generates and trains"
    if best.learner_wait_share > 0.3:
        return f"{where}; rollouts are the bound: the learner waits {best.learner_wait_share:.0%} of its time"
    if best.learner_wait_share < 0.1:
        return f"{where}; the learner is the bound: it waits only {best.learner_wait_share:.0%} of its time"
    return f"{where}; both sides keep each other busy: the learner waits {best.learner_wait_share:.0%} of its time"


def doubts(question: Question, plan: Plan) -> list[str]:
    """Why a split that was given may not fit its devices, by the same count of memory that a plan keeps to."""
    told = []
    room, least = _engine(question, plan.tensor_parallel).kv_tokens(plan.slots), _learner_devices(question)
    if plan.kv_cache_tokens > room:
        told.append(f"beside the weights an engine has room for {room:,} tokens of KV, not {plan.kv_cache_tokens:,}")
    if plan.learner_gpus < least:
        told.append(f"training {question.shape.name} takes at least {least} {question.device.name}")
    return told


def candidates(question: Question) -> Iterator[tuple[int, int, int]]:
    """(inference devices, tensor parallel degree, slots) that fit in memory."""
    total, smallest = question.num_devices, _learner_devices(question)
    for tensor_parallel in [n for n in _degrees(question) if _holds(question, n, 1)][:DEGREES]:
        shares = sorted({max(1, round(total * sixteenth / 16)) for sixteenth in range(2, 16, 2)})
        for inference_gpus in dict.fromkeys(n // tensor_parallel * tensor_parallel for n in shares):
            if inference_gpus < tensor_parallel or total - inference_gpus < smallest:
                continue
            for slots in _slots(question, tensor_parallel, inference_gpus // tensor_parallel):
                yield inference_gpus, tensor_parallel, slots


def _degrees(question: Question) -> list[int]:
    """Of tensor parallelism, by which the model can be cut within a node."""
    shape, largest = question.run.engine.shape, question.node_size
    return [n for n in (1, 2, 4, MOST_PARALLEL) if n <= largest and shape.cut_by(n)]


def _holds(question: Question, tensor_parallel: int, slots: int) -> bool:
    return _engine(question, tensor_parallel).kv_tokens(slots) >= question.longest


def _slots(question: Question, tensor_parallel: int, workers: int) -> list[int]:
    """As many as the samples in hand and the mean response allow, and half of that."""
    run, engine = question.run, _engine(question, tensor_parallel)
    assert isinstance(run.load, Load)
    mean = sum(run.load.lengths) / len(run.load.lengths)
    fitting = engine.kv_room() / engine.shape.seen(run.load.prompt_tokens / run.samples_per_prompt + mean / 2)
    in_hand = (run.async_steps + 1) * run.prompts_per_step * run.samples_per_prompt / workers
    likely = max(1, min(fitting, in_hand, 512))
    slots = {max(1, int(likely * factor)) for factor in (0.5, 1.0)}
    return sorted({n for n in slots if _holds(question, tensor_parallel, n)} or {1})


def _learner_devices(question: Question) -> int:
    """The fewest that hold weights, gradients and optimizer, sharded."""
    needed = question.shape.num_parameters * BYTES_PER_TRAINED_PARAMETER
    usable = question.device.memory * question.learner_share * (1 - ACTIVATION_SHARE)
    return max(1, -(-needed // int(usable)))


def _why_nothing_fits(question: Question) -> str:
    degrees, learners = _degrees(question), _learner_devices(question)
    fitting = [n for n in degrees if _holds(question, n, 1)]
    if not fitting:
        return (
            f"{question.shape.name} with sequences of {question.longest:,} tokens does not fit an inference worker "
            f"of {degrees[-1]} {question.device.name}; shorten rollout.max_response_tokens or "
            "take devices with more memory"
        )
    return (
        f"{question.num_devices} {question.device.name} are too few for {question.shape.name}: training it takes at "
        f"least {learners} and generating at least {fitting[0]} more; the smallest plan that fits has "
        f"{learners + fitting[0]}"
    )


def _engine(question: Question, tensor_parallel: int) -> EngineCost:
    return replace(question.run.engine, tensor_parallel=tensor_parallel)


def _learners(question: Question, inference_gpus: int) -> int:
    return 1 if question.shared else question.num_devices - inference_gpus


def setup_of(
    question: Question, inference_gpus: int, tensor_parallel: int, slots: int, *, most: int
) -> tuple[Setup, float]:
    """The set-up to simulate, of `most` workers at the most, and how many times larger the real one is."""
    run, engine = question.run, _engine(question, tensor_parallel)
    workers = inference_gpus // tensor_parallel
    prompts = -(-run.prompts_per_step * min(workers, most) // workers)
    share = prompts / run.prompts_per_step
    ranks = _learners(question, inference_gpus)
    blocks_of_all = slots * -(-question.longest // BLOCK_SIZE)
    setup = replace(
        run,
        engine=engine,
        learner=replace(run.learner, ranks=ranks, efficiency=run.learner.efficiency * share),
        sync=replace(run.sync, engines=workers, memory_bandwidth=engine.device.bandwidth * tensor_parallel),
        inference_workers=max(1, round(workers * share)),
        prompts_per_step=prompts,
        max_num_seqs=slots,
        kv_cache_tokens=min(engine.kv_tokens(slots), blocks_of_all * BLOCK_SIZE),
        block_size=BLOCK_SIZE,
    )
    return setup, 1 / share


def simulate(
    question: Question,
    inference_gpus: int,
    tensor_parallel: int,
    slots: int,
    steps: int = STEPS,
    *,
    workers: int = SIMULATED_WORKERS,
    kv_cache_tokens: int | None = None,
) -> Plan:
    """`kv_cache_tokens` of a worker; None: as many as fit."""
    setup, scale = setup_of(question, inference_gpus, tensor_parallel, slots, most=workers)
    if kv_cache_tokens is not None:
        setup = replace(setup, kv_cache_tokens=kv_cache_tokens)
    outcome = Simulation(setup).run(steps, warm_up=setup.async_steps + 1)
    return _plan(question, outcome, scale, inference_gpus, setup)


def _plan(question: Question, outcome: Outcome, scale: float, inference: int, setup: Setup) -> Plan:
    trained = outcome.trained_tokens_per_second * scale
    dollars_per_second = question.num_devices * question.device.dollars_per_hour / 3600
    return Plan(
        inference_gpus=inference,
        learner_gpus=_learners(question, inference),
        tensor_parallel=setup.engine.tensor_parallel,
        slots=setup.max_num_seqs,
        kv_cache_tokens=setup.kv_cache_tokens,
        tokens_per_second=outcome.tokens_per_second * scale,
        trained_tokens_per_second=trained,
        step_seconds=outcome.step_seconds,
        learner_wait_share=outcome.learner_wait_share,
        staleness_mean=outcome.staleness_mean,
        staleness_max=outcome.staleness_max,
        staleness=[outcome.lags.count(n) / len(outcome.lags) for n in range(outcome.staleness_max + 1) if outcome.lags],
        kv_used_share=outcome.kv_used_share,
        preemption_share=outcome.preemption_share,
        stall_seconds=outcome.stall_seconds,
        mbu=outcome.mbu,
        cost_per_million_trained_tokens=dollars_per_second / trained * 1e6 if trained else None,
    )


def factors(question: Question) -> dict[str, float | str]:
    """What the plan takes for granted; "engine" and "learner" say of which device."""
    engine, learner, sync = question.run.engine, question.run.learner, question.run.sync
    by_roofline = {
        "compute_efficiency": engine.compute_efficiency,
        "bandwidth_efficiency": engine.bandwidth_efficiency,
        "step_overhead": engine.step_overhead,
        "sequence_overhead": engine.sequence_overhead,
    }
    return {
        "engine": engine.device.name,
        **(by_roofline if engine.measured is None else {}),
        "learner": learner.device.name,
        "learner_efficiency": learner.efficiency,
        "learner_step_overhead": learner.step_overhead,
        "update_bandwidth": sync.bandwidth,
        "update_latency": sync.latency,
        "update_snapshot": sync.snapshot,
        "dollars_per_hour": engine.device.dollars_per_hour,
    }


def as_json(
    found: Sequence[Plan], question: Question, changes: dict[str, float], looked: Sequence[Plan] = ()
) -> dict[str, Any]:
    """`looked`: every split of a first look, the best first, of which `found` are the finalists."""
    engine = question.run.engine
    return {
        "plans": [asdict(plan) for plan in found],
        "best": asdict(found[0]),
        "why": explain(question, found[0]),
        "doubts": doubts(question, found[0]),
        "tried": [asdict(plan) | {"dropped": _why_dropped(plan, looked)} for plan in looked],
        "sensitivity": changes,
        "factors": factors(question)
        | {"measured": engine.measured and asdict(engine.measured), "device": asdict(engine.device)},
    }


def _why_dropped(plan: Plan, looked: Sequence[Plan]) -> str | None:
    """None for a finalist."""
    if plan in looked[:FINALISTS]:
        return None
    least = looked[FINALISTS - 1].trained_tokens_per_second
    return (
        f"at a first look, {COARSE_STEPS} steps of at most {COARSE_WORKERS} engines, it trains "
        f"{plan.trained_tokens_per_second:,.0f} tokens/s and the last finalist {least:,.0f}"
    )
