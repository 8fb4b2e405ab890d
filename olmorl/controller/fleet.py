"""The workers of a run, started and joined: engines, learners, and what each said of itself."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from olmorl.config.schema import Config
from olmorl.contract.errors import ModelError, WorkerLostError
from olmorl.contract.generation import EngineConfig, WorkerInfo, dtype_for
from olmorl.contract.training import LearnerConfig
from olmorl.controller.cluster import Cluster, Remote, answer_within
from olmorl.controller.placement import Placement
from olmorl.metrics.utilization import Peak

INFERENCE_WORKER = "inference.worker:InferenceWorker"
LEARNER_WORKER = "learner.worker:LearnerWorker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    engines: list[Remote]
    """as they were started; the supervisor knows which are left"""
    learners: list[Remote]
    engine_infos: list[WorkerInfo]
    learner_info: WorkerInfo

    @property
    def engine_peak(self) -> Peak:
        """Of one inference worker; all have the same device."""
        info = self.engine_infos[0]
        devices = info.devices
        return Peak(flops=devices * info.peak_flops, bandwidth=devices * info.peak_bandwidth, devices=devices)

    @property
    def peaks(self) -> dict[str, str]:
        """Of one device of each role, with its source."""
        return {"inference": self.engine_infos[0].peak, "learner": self.learner_info.peak}

    async def load(self, folder: Path, *, timeout: float) -> None:
        """Every learner rank takes weights and optimizer from a checkpoint."""
        await asyncio.gather(*(learner.call("load", str(folder), timeout=timeout) for learner in self.learners))


async def start_fleet(config: Config, *, cluster: Cluster, placement: Placement) -> Fleet:
    """Start every worker at once. Each has cluster.start_timeout_seconds."""
    deadline = config.cluster.start_timeout_seconds
    engines = [cluster.spawn_engine(f"inference-{i}") for i in range(placement.inference_workers)]
    learners = [cluster.spawn_learner(f"learner-{i}") for i in range(placement.learner_workers)]
    settings = engine_config(config, placement, cluster.log_dir)
    starts = asyncio.gather(*(_start_placed_engine(engine, settings, deadline) for engine in engines))
    infos, _ = await asyncio.gather(starts, _start_learners(learners, learner_config(config, placement), deadline))
    learner_info = await learners[0].call("info", timeout=deadline)
    if any(info.tensors != infos[0].tensors for info in infos):
        raise ModelError("the inference workers hold different models; are their model folders the same?")
    return Fleet(
        engines=engines,
        learners=learners,
        engine_infos=infos,
        learner_info=learner_info,
    )


async def _start_placed_engine(engine: Remote, settings: EngineConfig, deadline: float) -> WorkerInfo:
    try:
        await answer_within(deadline, asyncio.ensure_future(engine.placed()))
    except TimeoutError:
        raise WorkerLostError(f"{engine.name}: its process did not start within {deadline:g} s") from None
    return await start_engine(engine, settings, timeout=deadline)


async def start_engine(engine: Remote, settings: EngineConfig, *, timeout: float) -> WorkerInfo:
    """Make an engine of a process that is placed. Two answers, each within `timeout` seconds."""
    await engine.start(INFERENCE_WORKER, settings, name=engine.name, timeout=timeout)
    info: WorkerInfo = await engine.call("info", timeout=timeout)
    return info


async def _start_learners(learners: list[Remote], config: LearnerConfig, deadline: float) -> None:
    size = len(learners)
    await asyncio.gather(
        *(
            learner.start(LEARNER_WORKER, config, rank=rank, world_size=size, timeout=deadline)
            for rank, learner in enumerate(learners)
        )
    )
    host, port = await learners[0].call("host_rendezvous", timeout=deadline)
    await asyncio.gather(*(learner.call("start", host, port, timeout=deadline) for learner in learners))


def engine_config(config: Config, placement: Placement, log_dir: Path | None = None) -> EngineConfig:
    """`log_dir`: where a recorded schedule goes; None records none."""
    section = config.inference
    return EngineConfig(
        model=config.model.path,
        dtype=resolve_dtype(config, placement.inference_device),
        device=placement.inference_device,
        max_num_seqs=section.max_num_seqs,
        kv_cache_tokens=None if section.kv_cache_tokens == "auto" else section.kv_cache_tokens,
        gpu_memory_utilization=section.gpu_memory_utilization,
        block_size=section.block_size,
        max_tokens_per_step=section.max_tokens_per_step,
        max_model_len=config.max_model_tokens,
        prefix_caching=section.prefix_caching,
        batching=section.batching,
        quantization=section.quantization,
        quantize_head=section.quantize_head,
        kv_cache_dtype=section.kv_cache_dtype,
        speculative=section.speculative,
        draft_model=section.draft_model,
        speculative_tokens=section.speculative_tokens,
        speculative_step_tokens=section.speculative_step_tokens,
        overlap=section.overlap,
        cuda_graphs=section.cuda_graphs,
        tensor_parallel_size=placement.tensor_parallel,
        seed=config.run.seed,
        threads=placement.inference_threads,
        gpu_share=section.gpu_share,
        schedule_dir=str(log_dir / "schedule") if log_dir and config.logging.schedule else None,
    )


def learner_config(config: Config, placement: Placement) -> LearnerConfig:
    loss, optim, learner = config.loss, config.optim, config.learner
    return LearnerConfig(
        model=config.model.path,
        dtype=resolve_dtype(config, placement.learner_device),
        device=placement.learner_device,
        threads=placement.learner_threads,
        gpu_share=learner.gpu_share,
        activation_checkpointing=learner.activation_checkpointing,
        compile=learner.compile,
        shard_size=learner.shard_size,
        logprob_chunk_tokens=learner.logprob_chunk_tokens,
        temperature=config.sampling.temperature,
        objective=loss.objective,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        importance_cap=loss.importance_cap,
        importance_band=loss.importance_band,
        kl_beta=loss.kl_beta,
        kl_estimator=loss.kl_estimator,
        loss_denominator=loss.denominator,
        epochs=optim.epochs,
        lr=optim.lr,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps,
        total_steps=config.run.steps,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        nonfinite_dir=str(config.run.directory.absolute() / "logs" / "nonfinite"),
        seed=config.run.seed,
        wire_dtype=resolve_dtype(config, placement.inference_device),
    )


def resolve_dtype(config: Config, device: str) -> str:
    return dtype_for(device) if config.model.dtype == "auto" else config.model.dtype
