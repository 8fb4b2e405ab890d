"""What is simulated: the settings of a run, its load, and what things cost."""

from dataclasses import dataclass
from typing import Literal

from olmorl.planner.costs import EngineCost, LearnerCost, SyncCost
from olmorl.planner.load import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """By how much each side takes longer while the other is busy; more than 1 on a machine whose memory and caches
    both use."""

    engine: float = 1.0
    learner: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated; names as in the config."""

    load: Groups
    engine: EngineCost
    learner: LearnerCost
    sync: SyncCost
    sharing: Sharing = Sharing()
    inference_workers: int
    prompts_per_step: int
    samples_per_prompt: int
    max_num_seqs: int
    kv_cache_tokens: int
    async_steps: int = 1
    window: int | None = None
    active_sampling: bool = True
    oversampling: int = 1
    """without active sampling: so many times the prompts are drawn for a step, and those with signal are trained"""
    max_overtaken: int | None = None
    sync_mode: Literal["inflight", "pause", "drain"] = "inflight"
    recompute_kv: bool = False
    batching: Literal["continuous", "static"] = "continuous"
    block_size: int = 16
    max_tokens_per_step: int = 2048
    seed: int = 0
