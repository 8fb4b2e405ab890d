"""What OLMo 3's authors report of their runs, and the same set-ups simulated: `python -m olmorl.planner.published`.

Their ablation (2 nodes, one of 8 H100 that generates, Qwen2.5-7B, 64 x 2 samples, 32k, 16 sequences a GPU) fits one
number on its first row, the host's part of a step; the second number is the host's part of their "better threading"
row, which is what that row removed. All else is predicted: the other rows, the 32B run and the 7B run.
"""

from dataclasses import dataclass

from olmorl.planner.costs import EngineCost, LearnerCost, SyncCost, device
from olmorl.planner.load import Load, lognormal_lengths
from olmorl.planner.setup import Setup
from olmorl.planner.shape import model_shape
from olmorl.planner.simulation import Outcome, Simulation

MEAN, LONGEST = 14_628, 32_768  # response tokens, all runs
PROMPT = 1_024
LENGTHS = lognormal_lengths(MEAN, LONGEST)
H100 = device("h100")
OUR_SLOTS = 256  # more than our admission by live blocks finds room for
HOST_SECONDS_AT_FIRST = 0.0553  # of a step; by `fitted_host_seconds`, of the first row
HOST_SECONDS_THREADED = 0.0328  # of the third
OUR_HOST_SECONDS = 2e-3  # what the planner takes by default; CUDA graphs replay a step without the host


@dataclass(frozen=True, slots=True)
class AblationRow:
    name: str
    tokens_per_second: float


ABLATION = (
    AblationRow("OLMo 2 infrastructure", 881),
    AblationRow("+ continuous batching", 975),
    AblationRow("+ better threading", 1358),
    AblationRow("+ updates in flight", 2949),
)
SWITCHES: tuple[dict[str, str], ...] = (
    {"batching": "static", "sync_mode": "drain"},
    {"batching": "continuous"},
    {},
    {"sync_mode": "inflight"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    name: str
    shape: str
    inference_gpus: int
    tensor_parallel: int
    learner_gpus: int
    prompts_per_step: int
    samples_per_prompt: int
    async_steps: int
    max_num_seqs: int
    """as many sequences of the longest length as fit beside the weights: that is how their engines admit"""
    step_seconds: tuple[float, float]
    train_seconds: float | None
    zero_variance: float
    """share of groups without signal, which is not published: half for prompts that nobody filtered before, as in the
    ablation; none where they were and batches were not refilled"""


RUN_32B = PublishedRun(
    name="OLMo 3 32B, 8 + 20 nodes", shape="olmo3-32b", inference_gpus=160, tensor_parallel=8, learner_gpus=64,
    prompts_per_step=128, samples_per_prompt=8, async_steps=8, max_num_seqs=56, step_seconds=(1000, 1000),
    train_seconds=125, zero_variance=0.5,
)  # fmt: skip
RUN_7B = PublishedRun(
    name="OLMo 3 7B, 2 + 7 nodes", shape="olmo3-7b", inference_gpus=56, tensor_parallel=1, learner_gpus=16,
    prompts_per_step=64, samples_per_prompt=8, async_steps=1, max_num_seqs=12, step_seconds=(370, 430),
    train_seconds=None, zero_variance=0.0,
)  # fmt: skip


def ablation_setup(number: int, *, host_seconds: float, slots: int | None = 16) -> Setup:
    """Row `number` of their ablation. `slots` None: as many as our admission by live blocks finds room for."""
    shape = model_shape("qwen2.5-7b")
    engine = EngineCost(shape=shape, device=H100, step_overhead=host_seconds)
    switches: dict[str, str] = {}
    for laid in SWITCHES[: number + 1]:
        switches |= laid
    return Setup(
        load=Load(lengths=LENGTHS, prompt_tokens=PROMPT),
        engine=engine,
        learner=LearnerCost(shape=shape, device=H100, ranks=8),
        sync=SyncCost(shape=shape, engines=8, memory_bandwidth=H100.bandwidth),
        inference_workers=8,
        prompts_per_step=64,
        samples_per_prompt=2,
        max_num_seqs=slots or OUR_SLOTS,
        kv_cache_tokens=engine.kv_tokens(slots or OUR_SLOTS),
        block_size=128,
        async_steps=4,
        active_sampling=False,
        **switches,  # type: ignore[arg-type]
    )


def ablation_outcome(number: int, *, host_seconds: float, slots: int | None = 16, steps: int = 8) -> Outcome:
    return Simulation(ablation_setup(number, host_seconds=host_seconds, slots=slots)).run(steps, warm_up=5)


def fitted_host_seconds(number: int) -> float:
    """What the host takes of a step, for row `number` to come out as published; by halving."""
    wanted = ABLATION[number].tokens_per_second
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        if ablation_outcome(number, host_seconds=middle).tokens_per_second > wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def run_setup(run: PublishedRun, *, host_seconds: float, learner_efficiency: float) -> Setup:
    shape, engines = model_shape(run.shape), run.inference_gpus // run.tensor_parallel
    engine = EngineCost(
        shape=shape, device=H100, tensor_parallel=run.tensor_parallel, step_overhead=host_seconds
    )  # fmt: skip
    return Setup(
        load=Load(lengths=LENGTHS, prompt_tokens=PROMPT, zero_variance=run.zero_variance),
        engine=engine,
        learner=LearnerCost(shape=shape, device=H100, ranks=run.learner_gpus, efficiency=learner_efficiency),
        sync=SyncCost(shape=shape, engines=engines, memory_bandwidth=H100.bandwidth * run.tensor_parallel),
        inference_workers=engines,
        prompts_per_step=run.prompts_per_step,
        samples_per_prompt=run.samples_per_prompt,
        max_num_seqs=run.max_num_seqs,
        kv_cache_tokens=engine.kv_tokens(run.max_num_seqs),
        block_size=128,
        async_steps=run.async_steps,
    )


def fitted_learner_efficiency(run: PublishedRun) -> float:
    """Model FLOPs utilisation with which a step's mean tokens train in the published seconds."""
    assert run.train_seconds is not None, "no seconds of training are published"
    setup = run_setup(run, host_seconds=0.0, learner_efficiency=1.0)
    groups = [[MEAN] * run.samples_per_prompt] * run.prompts_per_step
    overhead = setup.learner.step_overhead
    return (setup.learner.train_seconds(PROMPT, groups) - overhead) / (run.train_seconds - overhead)


def run_outcome(run: PublishedRun, *, host_seconds: float, learner_efficiency: float, steps: int = 6) -> Outcome:
    setup = run_setup(run, host_seconds=host_seconds, learner_efficiency=learner_efficiency)
    return Simulation(setup).run(steps, warm_up=run.async_steps + 1)


def main() -> None:
    first, threaded = fitted_host_seconds(0), fitted_host_seconds(2)
    print(f"host seconds a step: {first:.4f} fitted on the first row, {threaded:.4f} on the third")
    for number, row in enumerate(ABLATION):
        found = ablation_outcome(number, host_seconds=first if number < 2 else threaded)
        print(f"{row.name}: {row.tokens_per_second:,.0f} tok/s published; {_told(found)}")
    for name, host in (("their host", threaded), ("our host", OUR_HOST_SECONDS)):
        for slots in (16, None):
            found = ablation_outcome(3, host_seconds=host, slots=slots)
            print(f"the last row with {name}, {slots or 'as many slots as live blocks allow'}: {_told(found)}")
    efficiency = fitted_learner_efficiency(RUN_32B)
    print(f"learner efficiency {efficiency:.2f}, fitted on 125 s of training a step of the 32B run")
    for run in (RUN_32B, RUN_7B):
        for host in (threaded, threaded / 2, OUR_HOST_SECONDS):
            found = run_outcome(run, host_seconds=host, learner_efficiency=efficiency)
            print(f"{run.name}: {run.step_seconds} s published; host {host:.4f} s: {_told(found)}")


def _told(found: Outcome) -> str:
    return (
        f"{found.tokens_per_second:,.0f} tok/s, step {found.step_seconds:,.0f} s, trains {found.train_seconds:.0f} s, "
        f"learner waits {found.learner_wait_share:.1%}, batch {found.live_batch:.1f}, slot waste "
        f"{found.slot_waste:.2f}, MBU {found.mbu:.0%}, lag {found.staleness_mean:.1f} ({found.staleness_max} at most), "
        f"recomputed {found.preemption_share:.1%}"
    )


if __name__ == "__main__":
    main()
