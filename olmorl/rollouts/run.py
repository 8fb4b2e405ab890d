"""A whole `olmorl rollout`: everything is composed here, and nothing is decided."""

import asyncio
import json
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from inference.model.architecture import read_architecture
from olmorl.config.data_sections import RewardSection
from olmorl.contract.generation import EngineConfig
from olmorl.controller.background import Background, first_cause
from olmorl.controller.cluster import Cluster, cluster_address
from olmorl.controller.placement import Placement, this_machine
from olmorl.controller.rollout import RolloutService
from olmorl.controller.scoring import Scorer, full_reward, verifiers_to_load
from olmorl.data.source import read_source
from olmorl.data.tokenizer import PromptEncoder, load_tokenizer
from olmorl.metrics.utilization import Peak, utilization
from olmorl.rollouts.engines import START_SECONDS, Engines
from olmorl.rollouts.job import RolloutJob
from olmorl.rollouts.output import RolloutFiles
from olmorl.rollouts.progress import RolloutProgress
from olmorl.rollouts.prompt_reader import PromptReader, count_rows, full_rewards, named_verifiers
from olmorl.rollouts.roller import Roller
from olmorl.rollouts.tally import Tally

log = logging.getLogger(__name__)

QUEUE = 1.25  # times the slots of the engines are kept filled with samples, so that a free one never waits for us


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """Everything that is known before an engine starts, so that bad input costs no start."""

    engine: EngineConfig
    placement: Placement
    encoder: PromptEncoder
    section: RewardSection
    verifiers: tuple[str, ...]
    total: int | None
    """prompts, where that is known"""


def run_rollout(job: RolloutJob) -> dict[str, Any]:
    """Returns what the summary file holds."""
    files = RolloutFiles(job.out, rows_per_file=job.rows_per_file)
    if not job.resume:
        files.refuse_existing()
    inputs = _load_inputs(job)
    tally, attempt = _begin(job, files, inputs.section)
    figures: dict[str, Any] = {}
    complete = False
    try:
        if inputs.total is None or tally.num_samples < inputs.total * job.params.n:
            cluster = Cluster(
                address=cluster_address(job.address),
                cpus=inputs.placement.cpus,
                log_dir=Path(f"{job.out}.logs").absolute(),
            )
            with cluster:
                cluster.reserve(inputs.placement, timeout=START_SECONDS)
                figures = asyncio.run(_roll_out(job, inputs, cluster, files=files, tally=tally, attempt=attempt))
        complete = True
    finally:
        files.close(complete=complete)
    summary = {**tally.summary(), **figures}
    files.summary_file.write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _load_inputs(job: RolloutJob) -> _Inputs:
    if os.path.isdir(job.engine.model):
        read_architecture(Path(job.engine.model))
    encoder = PromptEncoder(
        load_tokenizer(job.engine.model),
        apply_chat_template="auto" if job.apply_chat_template is None else job.apply_chat_template,
        system_prompt=job.system_prompt,
    )
    next(read_source(job.prompts, needs_answer=job.verifier is not None), None)
    section = RewardSection(workers=job.verifier_workers, timeout_seconds=job.verifier_timeout)
    placement, engine = _plan(job)
    if cluster_address(job.address) is None:
        placement.check([this_machine(cpus=placement.cpus)])
    return _Inputs(
        engine=engine,
        placement=placement,
        encoder=encoder,
        section=section,
        verifiers=_verifiers(job, section),
        total=count_rows(job.prompts),
    )


def _verifiers(job: RolloutJob, section: RewardSection) -> tuple[str, ...]:
    """Names to load. Raises ConfigError for one that is not known, or a row that names none and should."""
    if job.verifier is None:
        return ()
    given = job.given_verifiers
    return verifiers_to_load(section, named_verifiers(job.prompts) if given is None else given)


def _plan(job: RolloutJob) -> tuple[Placement, EngineConfig]:
    engine = job.engine
    share = max(1, (os.cpu_count() or 1) // (job.workers * engine.tensor_parallel_size))
    threads = engine.threads or (share if engine.device == "cpu" else None)
    model = os.path.abspath(engine.model) if os.path.isdir(engine.model) else engine.model
    placement = Placement(
        inference_workers=job.workers,
        learner_workers=0,
        shard_size=1,
        inference_device=engine.device,  # type: ignore[arg-type]
        learner_device="cpu",
        inference_threads=threads,
        learner_threads=None,
        tensor_parallel=engine.tensor_parallel_size,
    )
    return placement, replace(engine, model=model, threads=threads)


def _begin(job: RolloutJob, files: RolloutFiles, section: RewardSection) -> tuple[Tally, int]:
    """What is there already, and the number of this attempt."""
    tally = Tally(job.params.n)
    if not files.exists:
        files.begin(job.identity)
        return tally, 1
    full = full_rewards(job.prompts, verifiers=job.given_verifiers, full_reward=partial(full_reward, section))
    attempt = tally.recount(files.resume(job.identity), full) + 1
    log.info("%s: %d samples are there", job.out, tally.num_samples)
    return tally, attempt


async def _roll_out(
    job: RolloutJob, inputs: _Inputs, cluster: Cluster, *, files: RolloutFiles, tally: Tally, attempt: int
) -> dict[str, Any]:
    """What the tally does not know."""
    engines = Engines(cluster, inputs.engine, workers=job.workers)
    service = RolloutService(on_lost=engines.lost)
    background = Background()
    scorer: Scorer | None = None
    try:
        if inputs.verifiers:
            scorer = await Scorer.start(inputs.section, verifiers=inputs.verifiers)
        infos = await engines.start()
        engines.serve(service)
        reader = PromptReader(
            job.prompts,
            encoder=inputs.encoder,
            max_prompt_tokens=min(info.max_prompt_tokens or 0 for info in infos),
            verifiers=job.given_verifiers,
            scored=scorer is not None,
            full_reward=partial(full_reward, inputs.section),
        )
        roller = Roller(
            service=service,
            scorer=scorer,
            files=files,
            tally=tally,
            params=job.params,
            seed=job.seed,
            capacity=max(1, int(QUEUE * inputs.engine.max_num_seqs * job.workers)),
            attempt=attempt,
        )
        peak = Peak(flops=infos[0].peak_flops, bandwidth=infos[0].peak_bandwidth)
        progress = RolloutProgress(
            None if inputs.total is None else inputs.total * job.params.n,
            done=lambda: tally.num_samples,
            stats=lambda: service.stats,
            peak=peak,
        )
        background.start_loop("service", service.run())
        background.start_loop("engines", engines.run())
        background.start_loop("progress", progress.run())
        started, tokens = time.perf_counter(), tally.num_tokens
        await background.unless_failed(roller.run(iter(reader)))
        return _figures(service, peak, time.perf_counter() - started, tally.num_tokens - tokens, reader)
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    finally:
        await background.close()
        await service.close()
        if scorer is not None:
            await scorer.close()


def _figures(service: RolloutService, peak: Peak, seconds: float, tokens: int, reader: PromptReader) -> dict[str, Any]:
    stats = [counters for counters in service.stats.values() if counters]
    used = [utilization({}, counters, peak=peak, seconds="busy_seconds") for counters in stats]
    return {
        "prompts_too_long": reader.num_too_long,
        "this_attempt": {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "live_batch_mean": sum(c["mean_live_batch"] for c in stats) / max(len(stats), 1),
            "busy_mfu": sum(u.mfu for u in used) / max(len(used), 1),
            "busy_mbu": sum(u.mbu for u in used) / max(len(used), 1),
        },
    }
