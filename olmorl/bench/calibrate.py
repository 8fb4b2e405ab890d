"""What the planner needs to know of this machine: short benchmarks of the engine and the learner of a run.

Each is measured alone and then beside the other, for on one machine they share memory and caches.
"""

import json
import multiprocessing
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from olmorl.bench.engine import bench_engine, read_workload
from olmorl.bench.learner import bench_learner, read_batch, train_for_ever
from olmorl.config.schema import Config
from olmorl.contract.errors import WorkerError
from olmorl.controller.fleet import engine_config, learner_config
from olmorl.controller.placement import plan_placement
from olmorl.planner.load import Groups
from olmorl.planner.setup import Sharing
from olmorl.planner.shape import ModelShape, model_shape

WAVES = 3  # of slots that the engine's benchmark fills, the last of which runs out
LEARNER_STEPS = 3
READY_SECONDS = 180.0  # for the other side to load and compile
ENDING_SECONDS = 20.0  # for a step under way
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmarks:
    engines: dict[str | None, dict[str, Any]]
    """by quantization"""
    learner: dict[str, Any]
    sharing: Sharing


def benchmarks(config: Config, load: Groups, *, folder: Path, quantizations: Sequence[str] = ()) -> Benchmarks:
    """Of the engine and the learner of `config` on `load`; `folder` takes their files, and has them if called again."""
    shape = model_shape(config.model.path)
    workload, batch = folder / "workload.json", folder / "batch.json"
    if not workload.exists():
        _write_load(load, config, shape, workload=workload, batch=batch)
    engine, learner = _engine_options(config), _learner_options(config)
    trains = {"tokens_per_micro_batch": config.learner.tokens_per_micro_batch, "steps": LEARNER_STEPS}

    def engine_bench(name: str, quantization: str | None = None) -> dict[str, Any]:
        options = engine | {"quantization": quantization}
        return _kept(folder / f"{name}.json", bench_engine, config.model.path, workload, options)

    def learner_bench(name: str) -> dict[str, Any]:
        return _kept(folder / f"{name}.json", bench_learner, config.model.path, batch, learner, **trains)

    alone, trained_alone = engine_bench("engine"), learner_bench("learner")
    with _beside(_learner_for_ever, config.model.path, batch, learner, trains["tokens_per_micro_batch"]):
        beside = engine_bench("engine_beside")
    with _beside(_engine_for_ever, config.model.path, workload, engine):
        trained_beside = learner_bench("learner_beside")
    return Benchmarks(
        engines={None: alone} | {name: engine_bench(f"engine_{name}", name) for name in quantizations},
        learner=trained_alone,
        sharing=Sharing(
            engine=max(1.0, beside["seconds"] / alone["seconds"]),
            learner=max(1.0, trained_beside["seconds"] / trained_alone["seconds"]),
        ),
    )


def _kept(file: Path, bench: Callable[..., dict[str, Any]], *args: object, **options: object) -> dict[str, Any]:
    """In a process of its own, with threads and memory of its own; read from `file` if it is there."""
    if not file.exists():
        with ProcessPoolExecutor(1, mp_context=_SPAWN) as pool:
            file.write_text(json.dumps(pool.submit(bench, *args, **options).result()) + "\n")
    return dict(json.loads(file.read_text()))


def _write_load(load: Groups, config: Config, shape: ModelShape, *, workload: Path, batch: Path) -> None:
    rollout, rng = config.rollout, random.Random(config.run.seed)
    samples = rollout.samples_per_prompt
    wanted = -(-WAVES * config.inference.max_num_seqs // samples)
    groups = [load.group(number, samples, seed=config.run.seed)[0] for number in range(wanted)]
    prompts = [_tokens(rng, shape, load.prompt_tokens) for _ in groups]
    entries = [
        {"prompt": prompt, "max_tokens": length, "group": number}
        for number, (prompt, lengths) in enumerate(zip(prompts, groups, strict=True))
        for length in lengths
    ]
    workload.write_text(json.dumps(entries))
    trained = [load.group(number, samples, seed=config.run.seed)[0] for number in range(rollout.prompts_per_step)]
    batch.write_text(
        json.dumps(
            [
                {
                    "prompt": prompt, "tokens": _tokens(rng, shape, length), "logprobs": [-1.0] * length,
                    "advantage": 1.0 if i % 2 else -1.0,
                }
                for lengths in trained
                for prompt in [_tokens(rng, shape, load.prompt_tokens)]
                for i, length in enumerate(lengths)
            ]
        )
    )  # fmt: skip


def _tokens(rng: random.Random, shape: ModelShape, count: int) -> list[int]:
    return [rng.randrange(shape.vocab_size) for _ in range(count)]


def _engine_options(config: Config) -> dict[str, Any]:
    """Of a run, whose own batches may be static: what a step costs is the same."""
    options = asdict(engine_config(config, plan_placement(config))) | {"batching": "continuous"}
    del options["model"]
    return options


def _learner_options(config: Config) -> dict[str, Any]:
    options = asdict(learner_config(config, plan_placement(config)))
    del options["model"], options["lr"]
    return options


@contextmanager
def _beside(work: Callable[..., None], *args: object) -> Iterator[None]:
    """`work(*args, ready)` goes on in another process meanwhile."""
    ready = _SPAWN.Event()
    process = _SPAWN.Process(target=_until_told, args=(work, *args, ready), daemon=True)
    process.start()
    try:
        if not ready.wait(READY_SECONDS):
            raise WorkerError(
                f"{work.__name__} was not ready within {READY_SECONDS:.0f} s (exit code {process.exitcode})"
            )
        yield
        if not process.is_alive():
            raise WorkerError(f"{work.__name__} ended with exit code {process.exitcode} while it was needed")
    finally:
        process.terminate()
        process.join(ENDING_SECONDS)
        process.kill()
        process.join()


def _until_told(work: Callable[..., None], *args: object) -> None:
    """A request to end is an exit like any other, that leaves nothing behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    work(*args)


def _engine_for_ever(model: str, workload: Path, options: dict[str, Any], ready: Event) -> None:
    from inference.llm import LLM
    from olmorl.contract.generation import SamplingParams

    llm = LLM(model, **options)
    while True:
        for seed, group in enumerate(read_workload(workload)):
            params = SamplingParams(n=len(group.lengths), max_tokens=max(group.lengths), ignore_eos=True, seed=seed)
            llm.add_request(group.prompt, params, lengths=group.lengths)
        while llm.has_unfinished():
            llm.step()
            ready.set()


def _learner_for_ever(
    model: str, batch: Path, options: dict[str, Any], tokens_per_micro_batch: int, ready: Event
) -> None:
    train_for_ever(model, read_batch(batch), options, tokens_per_micro_batch=tokens_per_micro_batch, on_step=ready.set)
