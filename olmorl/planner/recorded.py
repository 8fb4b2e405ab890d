"""A run that was, or will be, as the simulation sees it: its settings, and the groups it recorded as a load."""

from collections import defaultdict
from pathlib import Path

from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.metrics.rollout_log import RolloutRow, read_rollouts
from olmorl.planner.costs import EngineCost, LearnerCost, SyncCost
from olmorl.planner.load import Groups, RecordedLoad
from olmorl.planner.setup import Setup, Sharing

_WITHOUT_SIGNAL = ("zero_variance", "error", "aborted")


def setup_of_run(
    config: Config, *, load: Groups, engine: EngineCost, learner: LearnerCost, sync: SyncCost, sharing: Sharing
) -> Setup:
    """What a simulation needs to be of this run."""
    rollout, inference = config.rollout, config.inference
    if isinstance(inference.kv_cache_tokens, str):
        kv_cache_tokens = engine.kv_tokens(inference.max_num_seqs, memory_share=inference.gpu_memory_utilization)
    else:
        kv_cache_tokens = inference.kv_cache_tokens
    return Setup(
        load=load,
        engine=engine,
        learner=learner,
        sync=sync,
        sharing=sharing,
        inference_workers=inference.workers,
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        max_num_seqs=inference.max_num_seqs,
        kv_cache_tokens=kv_cache_tokens,
        async_steps=rollout.async_steps,
        window=rollout.staleness_window,
        active_sampling=rollout.active_sampling,
        oversampling=rollout.oversampling or 1,
        max_overtaken=0 if rollout.oversampling else rollout.max_overtaken,
        sync_mode=config.sync.mode,
        recompute_kv=config.sync.kv == "recompute",
        batching=inference.batching,
        block_size=inference.block_size,
        max_tokens_per_step=inference.max_tokens_per_step,
        seed=config.run.seed,
    )


def recorded_load(directory: Path) -> RecordedLoad:
    """The groups of a run that met their fate, in the order of their admission.

    Raises:
        ConfigError: the run wrote none.
    """
    files = sorted((directory / "rollouts").glob("step_*.parquet"))
    if not files:
        raise ConfigError(
            f"{directory} has no rollouts; let the run go on for some steps, with logging.rollouts = true"
        )
    by_group: defaultdict[tuple[float, str], list[RolloutRow]] = defaultdict(list)
    for file in files:
        for row in read_rollouts(file):
            by_group[row.t_admitted, row.prompt_id].append(row)
    groups = []
    prompts: list[int] = []
    for _, rows in sorted(by_group.items(), key=lambda item: item[0]):
        rows.sort(key=lambda row: row.sample)
        groups.append(([len(row.token_ids) for row in rows], any(row.fate not in _WITHOUT_SIGNAL for row in rows)))
        prompts.append(len(rows[0].prompt_token_ids))
    return RecordedLoad(groups=groups, prompt_tokens=round(sum(prompts) / len(prompts)))
