"""Builds a session from its parts: the only place that knows all of them."""

import asyncio
import os
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from inference.model.architecture import read_architecture
from olmorl.config.schema import Config
from olmorl.contract.errors import ModelError
from olmorl.contract.training import ScoreRequest
from olmorl.controller.canary import canary_sequences
from olmorl.controller.cluster import Cluster, Remote
from olmorl.controller.fleet import start_engine, start_fleet
from olmorl.controller.placement import Placement
from olmorl.controller.recorder import Recorder, Totals
from olmorl.controller.resume import DriverState, PromptQueue
from olmorl.controller.rollout import RolloutService
from olmorl.controller.run_directory import RunDirectory
from olmorl.controller.scoring import Scorer, verifiers_to_load
from olmorl.controller.session import Session
from olmorl.controller.supervisor import EngineSupervisor
from olmorl.controller.sync import WeightSync
from olmorl.data.prompt import Prompt
from olmorl.data.prompt_set import PromptSet, load_prompts
from olmorl.data.stream import PromptStream
from olmorl.data.tokenizer import PromptEncoder, load_tokenizer
from olmorl.metrics.sinks import open_sinks


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything read from files before any worker starts, so that bad input costs no start-up."""

    train: PromptSet
    eval: list[Prompt]
    verifiers: tuple[str, ...]
    canary: ScoreRequest | None


def load_inputs(config: Config) -> Inputs:
    if os.path.isdir(config.model.path):
        read_architecture(Path(config.model.path))  # refuses a family that the engine does not know
    data, rollout = config.data, config.rollout
    encoder = PromptEncoder(
        load_tokenizer(config.model.path),
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
    )
    load = partial(
        load_prompts,
        encoder=encoder,
        max_prompt_tokens=rollout.max_prompt_tokens,
        verifiers=config.reward.verifier,
    )
    train = load(data.train)
    evaluation: list[Prompt] = []
    if config.eval.data is not None:
        held_out = load([config.eval.data])
        stream = PromptStream(held_out, seed=0, shuffle=False)
        evaluation = [stream.next() for _ in range(min(len(held_out), config.eval.limit or len(held_out)))]
    canary = canary_sequences(
        (example.token_ids for example in train.examples),
        count=config.sync.canary_sequences,
        length=config.sync.canary_tokens,
    )
    rows = [*train.verifiers, *(check.verifier for prompt in evaluation for check in prompt.checks)]
    return Inputs(train, evaluation, verifiers_to_load(config.reward, rows), canary)


async def compose(
    config: Config,
    *,
    inputs: Inputs,
    directory: RunDirectory,
    attempt: int,
    checkpoint: Path | None,
    cluster: Cluster,
    placement: Placement,
    scorer: Scorer,
) -> Session:
    """Start the workers and join them, from `checkpoint` if there is one."""
    stream = PromptStream(inputs.train, seed=config.run.seed, shuffle=config.data.shuffle)
    version, totals, prompts = 0, Totals(), PromptQueue(stream)
    if checkpoint is not None:
        state = DriverState.load(checkpoint, seed=config.run.seed)
        version, totals, prompts = state.step, state.totals, state.prompts(stream)
    fleet = await start_fleet(config, cluster=cluster, placement=placement)
    numbers = count(len(fleet.engines))  # a newcomer never takes a name that was there before

    def spawn() -> Remote:
        return cluster.spawn_engine(f"inference-{next(numbers)}", placement.engine_bundles)

    async def start(engine: Remote) -> None:
        info = await start_engine(engine, config=config, placement=placement)
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
        transport=_transport(config, placement),
        canary=inputs.canary,
        on_lost=supervisor.lost,
    )
    supervisor.attach(service=service, sync=sync)
    await sync.connect(fleet.engine_infos[0])
    await asyncio.gather(*(supervisor.watch(engine) for engine in fleet.engines))
    supervisor.invite(config.inference.most_workers - len(fleet.engines))
    if checkpoint is not None:
        await fleet.load(checkpoint / "learner", timeout=config.learner.step_timeout_seconds)
    recorder = Recorder(
        config=config,
        directory=directory,
        attempt=attempt,
        fleet=fleet,
        sinks=open_sinks(config, directory.path, first_step=version),
        totals=totals,
    )
    return Session(
        config=config,
        directory=directory,
        fleet=fleet,
        service=service,
        sync=sync,
        supervisor=supervisor,
        scorer=scorer,
        prompts=prompts,
        eval_prompts=inputs.eval,
        recorder=recorder,
        version=version,
    )


def _transport(config: Config, placement: Placement) -> str:
    if config.sync.transport != "auto":
        return config.sync.transport
    on_gpu = placement.inference_device == placement.learner_device == "cuda"
    return "nccl" if on_gpu else "gloo"
