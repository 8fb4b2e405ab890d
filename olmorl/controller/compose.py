"""Builds a session from its parts: the only place that knows all of them."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from inference.model.architecture import read_architecture
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, ModelError
from olmorl.contract.training import ScoreRequest
from olmorl.controller.canary import canary_sequences
from olmorl.controller.cluster import Cluster, Remote
from olmorl.controller.evaluate import EvalSet, load_eval_sets
from olmorl.controller.fleet import engine_config, resolve_dtype, start_engine, start_fleet
from olmorl.controller.group import Group
from olmorl.controller.loop import training_params
from olmorl.controller.parity import ParityGate, parity_limits, parity_prompts
from olmorl.controller.placement import Placement
from olmorl.controller.recorder import Recorder, Totals
from olmorl.controller.resume import DriverState, PromptQueue
from olmorl.controller.rollout import RolloutService
from olmorl.controller.run_directory import RunDirectory
from olmorl.controller.scoring import Scorer, full_reward, verifiers_to_load
from olmorl.controller.session import Session
from olmorl.controller.supervisor import EngineSupervisor
from olmorl.controller.sync import WeightSync
from olmorl.data.prompt import EncodedExample
from olmorl.data.prompt_set import PromptSet, check_lengths, load_prompts
from olmorl.data.selection import PromptSelection
from olmorl.data.stream import PromptStream
from olmorl.data.tokenizer import PromptEncoder, find_model, load_tokenizer
from olmorl.environments.registry import environment_path
from olmorl.metrics.sinks import open_sinks
from olmorl.metrics.time_ledger import TimeLedger
from olmorl.metrics.timeline import Timeline
from olmorl.rewards.verifier import check_keys


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything read from files before any worker starts, so that bad input costs no start-up."""

    train: PromptSet
    eval: tuple[EvalSet, ...]
    verifiers: tuple[str, ...]
    environments: tuple[str, ...]
    tokenizer: PreTrainedTokenizerFast
    canary: ScoreRequest | None
    parity: list[np.ndarray]

    @property
    def examples(self) -> list[EncodedExample]:
        """Every row, of training and evaluation."""
        return [*self.train.examples, *(prompt for one in self.eval for prompt in one.prompts)]


def load_inputs(config: Config) -> Inputs:
    encoder = load_encoder(config)
    data, rollout = config.data, config.rollout
    train = load_prompts(
        data.train,
        encoder=encoder,
        max_prompt_tokens=rollout.max_prompt_tokens,
        verifiers=config.reward.verifier,
        environment=rollout.environment,
        full_reward=partial(full_reward, config.reward),
    )
    evaluation = load_eval_sets(config, encoder)
    canary = canary_sequences(
        (example.token_ids for example in train.examples),
        count=config.sync.canary_sequences,
        length=config.sync.canary_tokens,
    )
    parity = parity_prompts(
        (example.token_ids for example in train.examples),
        count=max(config.sync.parity_prompts, config.inference.workers) if config.sync.parity_prompts else 0,
    )
    held_out = [prompt for one in evaluation for prompt in one.prompts]
    rows = [*train.verifiers, *(check.verifier for prompt in held_out for check in prompt.checks)]
    environments = environments_of([*train.environments, *(prompt.environment for prompt in held_out)])
    verifiers = verifiers_to_load(config.reward, rows)
    check_keys(rows, weights=config.reward.weights, remap=config.reward.remap)
    check_lengths(train.examples, samples_per_prompt=rollout.samples_per_prompt)
    return Inputs(train, evaluation, verifiers, environments, encoder.tokenizer, canary, parity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where an attempt begins: at the start of the data, or where a checkpoint stood."""

    version: int
    totals: Totals
    selection: PromptSelection
    prompts: PromptQueue
    groups: list[Group]
    """finished and not yet trained"""
    learner: Path | None
    """what its learners saved"""
    changes: tuple[str, ...] = ()
    """of settings, since then"""


def read_beginning(config: Config, inputs: Inputs, checkpoint: Path | None) -> Beginning:
    """Raises ConfigError when the checkpoint is broken, or was made from another seed or other data."""
    stream = PromptStream(inputs.train, seed=config.run.seed, shuffle=config.data.shuffle)
    selection = PromptSelection(
        stream,
        num_rows=len(inputs.train),
        retire_pass_rate=config.rollout.no_resampling_pass_rate,
        rest_steps=config.rollout.rest_steps,
    )
    if checkpoint is None:
        return Beginning(
            version=0, totals=Totals(), selection=selection, prompts=PromptQueue(selection), groups=[], learner=None
        )
    state = DriverState.load(checkpoint, config=config)
    changes = state.changes(config)
    try:
        prompts = state.prompts(selection)
    except ConfigError as error:
        raise ConfigError(f"{error}. Settings that changed: {'; '.join(changes) or 'none'}") from None
    return Beginning(
        version=state.step,
        totals=state.totals,
        selection=selection,
        prompts=prompts,
        groups=state.groups(selection),
        learner=checkpoint / "learner",
        changes=tuple(changes),
    )


def environments_of(named: Iterable[str | None]) -> tuple[str, ...]:
    """Each once. Raises ConfigError for an unknown name."""
    environments = tuple(dict.fromkeys(name for name in named if name))
    for name in environments:
        environment_path(name)
    return environments


def load_encoder(config: Config) -> PromptEncoder:
    """The tokenizer of a model that the engine knows. Raises ModelError: no such model, or of another family."""
    folder = find_model(config.model.path)
    read_architecture(folder)
    return PromptEncoder(
        load_tokenizer(str(folder)),
        apply_chat_template=config.data.apply_chat_template,
        system_prompt=config.data.system_prompt,
    )


async def compose(
    config: Config,
    *,
    inputs: Inputs,
    directory: RunDirectory,
    attempt: int,
    beginning: Beginning,
    cluster: Cluster,
    placement: Placement,
    scorer: Scorer,
) -> Session:
    """Start the workers and join them."""
    learner_time, started = TimeLedger(), time.time()
    fleet = await start_fleet(config, cluster=cluster, placement=placement)
    numbers = count(len(fleet.engines))  # a newcomer never takes a name that was there before

    def spawn() -> Remote:
        return cluster.spawn_engine(f"inference-{next(numbers)}")

    async def start(engine: Remote) -> None:
        settings = engine_config(config, placement, cluster.log_dir)
        info = await start_engine(engine, settings, timeout=config.cluster.start_timeout_seconds)
        if info.tensors != fleet.engine_infos[0].tensors:
            raise ModelError(f"{engine.name} on {info.host} holds another model; is its model folder the same?")

    supervisor = EngineSupervisor(
        spawn_engine=spawn,
        start_engine=start,
        has_node=cluster.has_node,
        heartbeat_seconds=config.cluster.heartbeat_seconds,
        max_restarts=config.cluster.max_restarts,
        min_workers=config.cluster.min_inference_workers,
        patience_seconds=config.cluster.start_timeout_seconds,
    )
    service = RolloutService(on_lost=supervisor.lost)
    sync = WeightSync(
        learners=fleet.learners,
        service=service,
        section=config.sync,
        transport=sync_transport(config, placement),
        canary=inputs.canary,
        on_lost=supervisor.lost,
    )
    supervisor.attach(service=service, sync=sync)
    await sync.connect(fleet.engine_infos[0])
    await asyncio.gather(*(supervisor.watch(engine) for engine in fleet.engines))
    supervisor.invite(config.inference.most_workers - len(fleet.engines))
    if beginning.learner is not None:
        await fleet.load(beginning.learner, timeout=config.learner.step_timeout_seconds)
    gate = ParityGate(
        prompts=inputs.parity,
        params=training_params(config, seed=config.run.seed),
        limits=parity_limits(
            resolve_dtype(config, placement.inference_device),
            resolve_dtype(config, placement.learner_device),
            tolerance=config.sync.parity_tolerance,
            quantization=config.inference.quantization,
            kv_cache_dtype=config.inference.kv_cache_dtype,
        ),
        service=service,
        learners=fleet.learners,
        timeout_seconds=config.sync.timeout_seconds,
    )
    recorder = Recorder(
        config=config,
        directory=directory,
        attempt=attempt,
        fleet=fleet,
        sinks=open_sinks(config, directory.path, first_step=beginning.version, counters=lambda: service.stats),
        totals=beginning.totals,
        carried_tokens=sum(group.tokens_received for group in beginning.groups),
    )
    has_timeline = config.logging.timeline_seconds > 0
    return Session(
        config=config,
        directory=directory,
        fleet=fleet,
        service=service,
        sync=sync,
        gate=gate,
        supervisor=supervisor,
        scorer=scorer,
        prompts=beginning.prompts,
        eval_sets=inputs.eval,
        recorder=recorder,
        attempt=attempt,
        groups=beginning.groups,
        timeline=Timeline(directory.timeline_file, peak=fleet.engine_peak, started=started) if has_timeline else None,
        learner_time=learner_time,
        selection=beginning.selection,
        version=beginning.version,
    )


def sync_transport(config: Config, placement: Placement) -> str:
    """What carries updates. ConfigError for ipc between devices that cannot share memory."""
    devices = (placement.inference_device, placement.learner_device)
    if config.sync.transport == "ipc" and (devices[0] != devices[1] or ("cuda" in devices and not config.shares_gpu)):
        raise ConfigError(
            f"sync.transport = 'ipc' maps the learner's memory into the engines, but they are on {devices[0]} and the "
            f"learner is on {devices[1]}, each with a device of its own; set inference.gpu_share and learner.gpu_share "
            "to put both on one GPU, or leave sync.transport at 'auto'"
        )
    if config.sync.transport != "auto":
        return config.sync.transport
    if devices == ("cuda", "cuda"):
        return "ipc" if config.shares_gpu else "nccl"
    return "gloo"
