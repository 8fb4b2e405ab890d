"""What is to be planned, from the config of a run: its model, its load, the devices it is to have."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.planner.costs import EngineCost, LearnerCost, SyncCost, device
from olmorl.planner.fit import fitted_engine, fitted_learner
from olmorl.planner.load import Load, lognormal_lengths, read_lengths
from olmorl.planner.plan import MOST_PARALLEL, Question
from olmorl.planner.recorded import setup_of_run
from olmorl.planner.setup import Sharing
from olmorl.planner.shape import model_shape

MEAN_OF_LONGEST = 14628 / 32768
"""OLMo 3's; taken where nothing is said of lengths"""
ZERO_VARIANCE = 0.3
IN_TURNS = Sharing(engine=2.0, learner=2.0)  # two processes that both have work for one device


def question_of(
    config: Config,
    *,
    num_devices: int | None,
    device_name: str,
    node_size: int = MOST_PARALLEL,
    shape: str | None = None,
    lengths: Path | None = None,
    mean_length: float | None = None,
    zero_variance: float = ZERO_VARIANCE,
    bench: Path | None = None,
    learner_bench: Path | None = None,
    price_per_hour: float | None = None,
) -> Question:
    """`num_devices` None: as the config splits them; `shape`: a model's name in place of model.path; `lengths`: see
    read_lengths; `bench`, `learner_bench`: JSON of `olmorl bench engine` and `olmorl bench learner`; `price_per_hour`:
    dollars, of one device, in place of a round price of `device_name`.

    Raises:
        ConfigError: fewer than 2 devices to split, or one of these names what is not there.
    """
    rollout, inference = config.rollout, config.inference
    hardware, shared = device(device_name), num_devices is None and config.shares_gpu
    if price_per_hour is not None:
        hardware = replace(hardware, dollars_per_hour=price_per_hour)
    if shared:
        if inference.workers > 1:
            raise ConfigError(f"one device is planned for one inference worker, and here are {inference.workers}")
        num_devices, hardware = 1, replace(hardware, memory=hardware.memory * inference.gpu_share)
    elif num_devices is None:
        num_devices = inference.workers * inference.tensor_parallel + config.learner.workers
    elif num_devices < 2:
        raise ConfigError(
            f"a plan splits at least 2 devices, and here is {num_devices}; one that serves both roles "
            "(inference.gpu_share, learner.gpu_share) needs no plan, and --as-given tells what to expect of it"
        )
    model = replace(model_shape(shape or config.model.path), element_size=4 if config.model.dtype == "float32" else 2)
    longest = rollout.max_response_tokens
    mean = max(1.0, MEAN_OF_LONGEST * longest) if mean_length is None else mean_length
    drawn = read_lengths(lengths) if lengths else lognormal_lengths(mean, longest)
    held = replace(model, quantization=inference.quantization, quantize_head=inference.quantize_head)
    engine = EngineCost(shape=held, device=hardware)
    if bench is not None:
        engine = fitted_engine(engine, read_bench(bench, "--bench"))
    passes = 3 + config.learner.activation_checkpointing
    learner = LearnerCost(shape=model, device=engine.device, ranks=1, passes=passes)
    if learner_bench is not None:
        learner = fitted_learner(model, read_bench(learner_bench, "--learner-bench"))
    run = setup_of_run(
        config,
        load=Load(
            lengths=[min(n, longest) for n in drawn],
            prompt_tokens=max(1, rollout.max_prompt_tokens // 2),
            zero_variance=zero_variance,
        ),
        engine=engine,
        learner=learner,
        sync=SyncCost(shape=model),
        sharing=IN_TURNS if shared else Sharing(),
    )
    return Question(
        run=run,
        num_devices=num_devices,
        longest=rollout.max_prompt_tokens + longest,
        node_size=node_size if inference.quantization is None else 1,
        shared=shared,
        learner_share=config.learner.gpu_share / inference.gpu_share if shared else 1.0,
    )


def read_bench(path: Path, option: str) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        figures = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {error}") from None
    if not isinstance(figures, dict):
        raise ConfigError(f"{option} {path}: not the JSON of a benchmark")
    return figures
