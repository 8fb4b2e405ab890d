"""The names a run's metrics go by.

Dashboards, notebooks and other programs rely on them, so they stand in one place; a test looks for every name written
in the code. A name in angle brackets stands for any word.
"""

import re

_GROUPS = {
    "progress": "step episodes epoch tokens_total",
    "reward": "mean std solve_rate <source>/mean zero_variance_fraction unscored_fraction",
    "verdict": "timeout error unscorable",
    "active_sampling": (
        "offered_groups kept_groups offered_length_mean kept_length_mean offered_pass_rate/<bin> kept_pass_rate/<bin> "
        "overtaken_fraction overtaken_length_mean on_time_length_mean retired_prompts resting_prompts skipped_prompts"
    ),
    "rollout": "response_length_mean response_length_max response_length_p95 truncated_fraction entropy",
    "off_policy": (
        "version_lag_mean version_lag_max token_age_mean importance_ratio_mean importance_ratio_max "
        "importance_weight_mean capped_fraction banned_fraction"
    ),
    "mismatch": "logprob_abs_diff_mean logprob_abs_diff_max kl",
    "canary": "logprob_abs_diff_mean logprob_abs_diff_max checksum_ok",
    "age": "<n>/token_share <n>/loss <n>/mismatch",
    "loss": "policy kl clip_fraction",
    "optim": "lr grad_norm skipped_steps",
    "throughput": (
        "tokens_per_second trained_tokens_per_second tokens_per_second_per_device inference_mfu inference_mbu "
        "learner_mfu goodput decode_mfu decode_mbu prefill_mfu prefill_mbu"
    ),
    "engine": (
        "live_batch_mean kv_usage slot_waste preemptions prefill_tokens_computed prefill_tokens_shared "
        "prefix_hit_rate step_seconds draft_acceptance"
    ),
    "time": "step wait_for_batch wait_for_straggler wait_for_policy train reward checkpoint eval",
    "engine_time": "starting prefill decode recompute stalled waiting",
    "learner_time": "starting waiting training sending checkpointing",
    "sync": "seconds stall_seconds bytes failures",
    "waste": "trained zero_variance surplus stale truncated aborted eval error rolled_back lost",
    "eval": (
        "<set>/avg_at_k <set>/avg_at_k_stderr <set>/pass_at_k <set>/pass_at_k_stderr <set>/unscored_fraction "
        "<set>/truncated_fraction <set>/response_length_mean"
    ),
    "faults": "worker_restarts prompts_reissued",
}

METRIC_NAMES: tuple[str, ...] = tuple(f"{group}/{name}" for group, names in _GROUPS.items() for name in names.split())

_PATTERN = re.compile("|".join(re.sub("<[a-z]+>", "[^/]+", re.escape(name)) for name in METRIC_NAMES))


def is_declared(name: str) -> bool:
    """True when `name` is one of METRIC_NAMES, its bracketed word filled in."""
    return _PATTERN.fullmatch(name) is not None
