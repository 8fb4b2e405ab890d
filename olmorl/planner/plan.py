"""Which split of the devices serves a run best: every candidate simulated, the best named, and what it hangs on."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from olmorl.contract.errors import ConfigError
from olmorl.planner.costs import LEARNER_EFFICIENCY, Device, EngineCost, LearnerCost, SyncCost
from olmorl.planner.load import Load
from olmorl.planner.setup import Setup, Sharing
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
IN_TURNS = Sharing(engine=2.0, learner=2.0)  # two processes that both have work for one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned; names as in the config."""

    shape: ModelShape
    device: Device
    num_devices: int
    node_size: int = MOST_PARALLEL
    """devices of a node, the most that one inference worker may have"""
    shared: bool = False
    """one device has both roles"""
    load: Load
    prompts_per_step: int
    samples_per_prompt: int
    max_response_tokens: int
    async_steps: int
    active_sampling: bool
    seed: int = 0
    factors: EngineCost | None = None
    """what an engine costs; None takes the defaults"""
    learner_efficiency: float = LEARNER_EFFICIENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    inference_gpus: int
    learner_gpus: int
    tensor_parallel: int
    slots: int
    """samples decoded at once by one worker"""
    tokens_per_second: float
    trained_tokens_per_second: float
    step_seconds: float
    learner_wait_share: float
    staleness_mean: float
    staleness_max: int
    preemption_share: float
    stall_seconds: float
    mbu: float
    cost_per_million_trained_tokens: float


def plans(question: Question, *, steps: int = STEPS, progress: Callable[[int, int], None] | None = None) -> list[Plan]:
    """All candidates, the best first: the most trained tokens a second, all devices being paid for.

    Raises:
        ConfigError: the model fits on no split of these devices; says what it needs.
    """
    tried = list(candidates(question))
    if not tried:
        raise ConfigError(_why_nothing_fits(question))
    coarse = []
    for number, (inference_gpus, tensor_parallel, slots) in enumerate(tried):
        coarse.append(simulate(question, inference_gpus, tensor_parallel, slots, COARSE_STEPS, workers=COARSE_WORKERS))
        if progress is not None:
            progress(number + 1, len(tried))
    best = sorted(coarse, key=_rank)[:FINALISTS]
    again = sorted((_again(question, plan, steps, workers=FINAL_WORKERS) for plan in best), key=_rank)
    return [_again(question, again[0], steps, workers=SIMULATED_WORKERS), *again[1:]]


def _again(question: Question, plan: Plan, steps: int, *, workers: int) -> Plan:
    return simulate(question, plan.inference_gpus, plan.tensor_parallel, plan.slots, steps, workers=workers)


def _rank(plan: Plan) -> float:
    return -plan.trained_tokens_per_second


def sensitivity(question: Question, best: Plan, *, steps: int = STEPS) -> dict[str, float]:
    """Trained tokens a second of the best plan, relative to what it is, when one thing changes."""

    before = _again(question, best, steps, workers=FINAL_WORKERS).trained_tokens_per_second

    def again(changed: Question) -> float:
        return _again(changed, best, steps, workers=FINAL_WORKERS).trained_tokens_per_second / before - 1

    engine = _engine(question, best.tensor_parallel)
    load = question.load
    return {
        "one more asynchronous step": again(replace(question, async_steps=question.async_steps + 1)),
        "engine steps 10 % shorter": again(replace(question, factors=replace(engine, slowdown=engine.slowdown * 0.9))),
        "responses half as long": again(
            replace(question, load=replace(load, lengths=[-(-n // 2) for n in load.lengths]))
        ),
        "no group without signal": again(replace(question, load=replace(load, zero_variance=0.0))),
    }


def explain(question: Question, best: Plan) -> str:
    """One sentence on what bounds the best plan."""
    where = f"{best.inference_gpus} of {question.num_devices} devices generate"
    fewer = ", and with fewer devices it would not have the memory or would become the bound"
    if question.shared:
        where, fewer = "one device generates and trains", ""
    if best.learner_wait_share > 0.3:
        return f"{where}; rollouts are the bound: the learner waits {best.learner_wait_share:.0%} of its time{fewer}"
    if best.learner_wait_share < 0.1:
        return f"{where}; the learner is the bound: it waits only {best.learner_wait_share:.0%} of its time"
    return f"{where}; both sides keep each other busy: the learner waits {best.learner_wait_share:.0%} of its time"


def candidates(question: Question) -> Iterator[tuple[int, int, int]]:
    """(inference devices, tensor parallel degree, slots) that fit in memory."""
    total = question.num_devices
    longest = question.load.prompt_tokens + question.max_response_tokens
    degrees = [degree for degree in (1, 2, 4, MOST_PARALLEL) if degree <= question.node_size]
    fitting = [degree for degree in degrees if _engine(question, degree).kv_tokens(1) >= longest]
    for tensor_parallel in fitting[:DEGREES]:
        engine = _engine(question, tensor_parallel)
        smallest = _learner_devices(question)
        shares = sorted({max(1, round(total * sixteenth / 16)) for sixteenth in range(2, 16, 2)})
        for inference_gpus in dict.fromkeys(n // tensor_parallel * tensor_parallel for n in shares):
            if inference_gpus < tensor_parallel or total - inference_gpus < smallest:
                continue
            for slots in _slots(question, engine, inference_gpus // tensor_parallel):
                yield inference_gpus, tensor_parallel, slots


def _slots(question: Question, engine: EngineCost, workers: int) -> list[int]:
    """As many as the samples in hand and the mean response allow, and half and twice that."""
    mean = sum(question.load.lengths) / len(question.load.lengths)
    fitting = engine.kv_room() / engine.shape.seen(question.load.prompt_tokens / question.samples_per_prompt + mean / 2)
    in_hand = (question.async_steps + 1) * question.prompts_per_step * question.samples_per_prompt / workers
    likely = max(1, min(fitting, in_hand, 512))
    return sorted({max(1, int(likely * factor)) for factor in (0.5, 1.0)})


def _learner_devices(question: Question) -> int:
    """The fewest that hold weights, gradients and optimizer, sharded."""
    needed = question.shape.num_parameters * BYTES_PER_TRAINED_PARAMETER
    return max(1, -(-needed // int(question.device.memory * (1 - ACTIVATION_SHARE))))


def _why_nothing_fits(question: Question) -> str:
    largest = min(question.node_size, MOST_PARALLEL)
    engine, learners = _engine(question, largest), _learner_devices(question)
    longest = question.load.prompt_tokens + question.max_response_tokens
    if engine.kv_tokens(1) < longest:
        return (
            f"{question.shape.name} with sequences of {longest:,} tokens does not fit an inference worker of {largest} "
            f"{question.device.name}; shorten rollout.max_response_tokens or take devices with more memory"
        )
    return (
        f"{question.num_devices} {question.device.name} are too few for {question.shape.name}: training it takes at "
        f"least {learners} and generating at least 1 more; the smallest plan that fits has {learners + 1}"
    )


def _engine(question: Question, tensor_parallel: int) -> EngineCost:
    if question.factors is not None:
        return replace(question.factors, tensor_parallel=tensor_parallel)
    return EngineCost(shape=question.shape, device=question.device, tensor_parallel=tensor_parallel)


def _learners(question: Question, inference_gpus: int) -> int:
    return 1 if question.shared else question.num_devices - inference_gpus


def setup_of(
    question: Question, inference_gpus: int, tensor_parallel: int, slots: int, *, most: int
) -> tuple[Setup, float]:
    """The set-up to simulate, of `most` workers at the most, and how many times larger the real one is."""
    engine = _engine(question, tensor_parallel)
    workers = inference_gpus // tensor_parallel
    simulated = min(workers, most)
    scale = workers / simulated
    prompts = max(1, round(question.prompts_per_step / scale))
    return (
        Setup(
            load=question.load,
            engine=engine,
            learner=LearnerCost(
                shape=question.shape, device=engine.device, ranks=_learners(question, inference_gpus),
                efficiency=question.learner_efficiency * prompts / question.prompts_per_step,
            ),
            sync=SyncCost(shape=question.shape),
            sharing=IN_TURNS if question.shared else Sharing(),
            inference_workers=simulated,
            prompts_per_step=prompts,
            samples_per_prompt=question.samples_per_prompt,
            max_num_seqs=slots,
            kv_cache_tokens=engine.kv_tokens(slots),
            block_size=BLOCK_SIZE,
            async_steps=question.async_steps,
            active_sampling=question.active_sampling,
            seed=question.seed,
        ),
        question.prompts_per_step / prompts,
    )  # fmt: skip


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
    outcome = Simulation(setup).run(steps, warm_up=question.async_steps + 1)
    return _plan(question, outcome, scale, inference_gpus, tensor_parallel, slots)


def _plan(question: Question, outcome: Outcome, scale: float, inference: int, tensor_parallel: int, slots: int) -> Plan:
    trained = outcome.trained_tokens_per_second * scale
    dollars_per_second = question.num_devices * question.device.dollars_per_hour / 3600
    return Plan(
        inference_gpus=inference,
        learner_gpus=_learners(question, inference),
        tensor_parallel=tensor_parallel,
        slots=slots,
        tokens_per_second=outcome.tokens_per_second * scale,
        trained_tokens_per_second=trained,
        step_seconds=outcome.step_seconds,
        learner_wait_share=outcome.learner_wait_share,
        staleness_mean=outcome.staleness_mean,
        staleness_max=outcome.staleness_max,
        preemption_share=outcome.preemption_share,
        stall_seconds=outcome.stall_seconds,
        mbu=outcome.mbu,
        cost_per_million_trained_tokens=dollars_per_second / trained * 1e6 if trained else float("inf"),
    )


def as_json(found: list[Plan], question: Question, changes: dict[str, float]) -> dict[str, Any]:
    engine = _engine(question, found[0].tensor_parallel)
    return {
        "plans": [asdict(plan) for plan in found],
        "best": asdict(found[0]),
        "why": explain(question, found[0]),
        "sensitivity": changes,
        "factors": {
            "measured": None if engine.measured is None else asdict(engine.measured),
            "learner_efficiency": question.learner_efficiency,
            "compute_efficiency": engine.compute_efficiency,
            "bandwidth_efficiency": engine.bandwidth_efficiency,
            "step_overhead": engine.step_overhead,
            "sequence_overhead": engine.sequence_overhead,
            "device": asdict(engine.device),
        },
    }
