"""A run that was, or will be, as the simulation sees it: its settings, and the groups it recorded as a load."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Literal

from olmorl.config.schema import Config
from olmorl.metrics.rollout_log import RolloutRow, read_rollouts, rollout_files
from olmorl.planner.costs import EngineCost, LearnerCost, SyncCost
from olmorl.planner.load import Groups, RecordedLoad
from olmorl.planner.setup import Setup, Sharing

_WITHOUT_SIGNAL = ("zero_variance", "error", "aborted")


def setup_of_run(
    config: Config, *, load: Groups, engine: EngineCost, learner: LearnerCost, sync: SyncCost, sharing: Sharing
) -> Setup:
    """What a simulation needs to be of this run."""
    rollout, inference, optim = config.rollout, config.inference, config.optim
    engine = replace(engine, shape=engine.shape.within(config.max_model_tokens))
    standing = config.sync.mode == "inflight" and config.sync.staging == "none"  # while it receives
    scored = (optim.epochs * optim.mini_batches > 1) + (config.loss.kl_beta > 0)  # for old and reference logprobs
    if isinstance(inference.kv_cache_tokens, str):
        kv_cache_tokens = engine.kv_tokens(inference.max_num_seqs, memory_share=inference.gpu_memory_utilization)
    else:
        kv_cache_tokens = inference.kv_cache_tokens
    return Setup(
        load=load,
        engine=engine,
        learner=replace(learner, passes=optim.epochs * learner.passes + scored),
        sync=replace(sync, engines=inference.workers, transport=transport_of(config)),
        sharing=sharing,
        inference_workers=inference.workers,
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        max_num_seqs=inference.max_num_seqs,
        kv_cache_tokens=kv_cache_tokens,
        async_steps=rollout.async_steps,
        window=rollout.window,
        active_sampling=rollout.active_sampling,
        oversampling=rollout.oversampling or 1,
        max_overtaken=0 if rollout.oversampling else rollout.max_overtaken,
        sync_mode="pause" if standing else config.sync.mode,
        recompute_kv=config.sync.kv == "recompute",
        batching=inference.batching,
        block_size=inference.block_size,
        max_tokens_per_step=inference.max_tokens_per_step,
        seed=config.run.seed,
    )


def transport_of(config: Config) -> Literal["nccl", "ipc", "gloo"]:
    """What carries the updates, if roles whose device is "auto" find GPUs."""
    if config.sync.transport != "auto":
        return config.sync.transport
    if config.shares_gpu:
        return "ipc"
    return "gloo" if "cpu" in (config.inference.device, config.learner.device) else "nccl"


def recorded_load(directory: Path) -> RecordedLoad:
    """The groups of a run that met their fate, in the order of their admission.

    Raises:
        DataError: the run wrote none.
    """
    by_group: defaultdict[tuple[float, str], list[RolloutRow]] = defaultdict(list)
    for file in rollout_files(directory):
        for row in read_rollouts(file):
            by_group[row.t_admitted, row.prompt_id].append(row)
    groups = []
    prompts: list[int] = []
    for _, rows in sorted(by_group.items(), key=lambda item: item[0]):
        rows.sort(key=lambda row: row.sample)
        groups.append(([len(row.token_ids) for row in rows], any(row.fate not in _WITHOUT_SIGNAL for row in rows)))
        prompts.append(len(rows[0].prompt_token_ids))
    return RecordedLoad(groups=groups, prompt_tokens=round(sum(prompts) / len(prompts)))
