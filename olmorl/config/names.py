"""What a name in a config file or an override means: a key, an alias, or a mistake with a nearest neighbour."""

import difflib

from pydantic.fields import FieldInfo

from olmorl.config.schema import Config
from olmorl.config.section import Section
from olmorl.contract.errors import ConfigError


def _sections() -> dict[str, type[Section]]:
    sections: dict[str, type[Section]] = {}
    for name, info in Config.model_fields.items():
        assert isinstance(info.annotation, type) and issubclass(info.annotation, Section), f"{name} is no section"
        sections[name] = info.annotation
    return sections


SECTIONS = _sections()
FIELDS: dict[str, FieldInfo] = {
    f"{section}.{key}": info for section, model in SECTIONS.items() for key, info in model.model_fields.items()
}

ALIASES = {
    "num_unique_prompts_rollout": "rollout.prompts_per_step",
    "num_samples_per_prompt_rollout": "rollout.samples_per_prompt",
    "response_length": "rollout.max_response_tokens",
    "max_prompt_token_length": "rollout.max_prompt_tokens",
    "rho_clamp_upper_bound": "loss.importance_cap",
    "clip_lower": "loss.clip_low",
    "clip_higher": "loss.clip_high",
    "beta": "loss.kl_beta",
    "num_mini_batches": "optim.mini_batches",
    "num_epochs": "optim.epochs",
    "inflight_updates": "sync.mode",
    "vllm_tensor_parallel_size": "inference.tensor_parallel",
    "verification_reward": "reward.scale",
    "code_max_execution_time": "reward.code_seconds",
    "code_pass_rate_reward_threshold": "reward.code_pass_threshold",
    "llm_judge_model": "reward.judge_model",
    "llm_judge_max_tokens": "reward.judge_max_tokens",
}
"""open-instruct's own flag names"""

ELSEWHERE = {
    "group_size": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "num_samples": "rollout.samples_per_prompt",
    "batch_size": "rollout.prompts_per_step",
    "train_batch_size": "rollout.prompts_per_step",
    "max_completion_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "learning_rate": "optim.lr",
    "num_iterations": "optim.epochs",
    "ppo_epochs": "optim.epochs",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "kl_coef": "loss.kl_beta",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "torch_compile": "learner.compile",
    "max_steps": "run.steps",
    "run_name": "run.name",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
}
"""What verl, TRL and others call it. Not taken, for what is counted may differ, but the key is named."""


def find_key(name: str, *, where: str) -> str:
    """The dotted key that `name` stands for: itself, an alias, or a bare field name that only one section has."""
    if name in FIELDS:
        return name
    if name in ALIASES:
        return ALIASES[name]
    if name in SECTIONS:
        raise ConfigError(f"{where}: {name!r} is a section, not a key; its keys are {_list_keys(name)}")
    owners = [key for key in FIELDS if key.split(".")[1] == name]
    if len(owners) > 1:
        raise ConfigError(f"{where}: {name!r} may mean {' or '.join(owners)}; write one of them in full")
    if owners:
        return owners[0]
    raise ConfigError(f"{where}: unknown {_describe_unknown(name)}")


def _describe_unknown(name: str) -> str:
    section, _, key = name.rpartition(".")
    if section.partition(".")[0] in SECTIONS and "." in section:  # a table where no key is one
        return _describe_unknown(section)
    if section and section not in SECTIONS:
        return _describe_unknown_section(section, key)
    nearest = _nearest_key(section, key)
    if nearest:
        return f"key {name!r}; did you mean {nearest}?"
    if section:
        return f"key {name!r}; the keys of [{section}] are {_list_keys(section)}"
    return f"key {name!r}; the sections are {', '.join(SECTIONS)}"


def _describe_unknown_section(section: str, key: str) -> str:
    close = difflib.get_close_matches(section, SECTIONS, n=1)
    if not close:
        nearest = _nearest_key("", key)
        hint = f"did you mean {nearest}?" if nearest else f"the sections are {', '.join(SECTIONS)}"
    elif not key:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"did you mean {_nearest_key(close[0], key) or close[0]}?"
    return f"section {section!r}; {hint}"


def _nearest_key(section: str, key: str) -> str | None:
    """First the same name elsewhere, then a like one in the section, then a like one anywhere."""
    if f"{section}.{key}" in FIELDS:
        return f"{section}.{key}"
    if key in ALIASES or key in ELSEWHERE:
        return ALIASES.get(key) or ELSEWHERE[key]
    bare: dict[str, str] = {}
    for full in FIELDS:
        bare.setdefault(full.split(".")[1], full)
    if key in bare:
        return bare[key]
    if section:
        close = difflib.get_close_matches(key, SECTIONS[section].model_fields, n=1)
        if close:
            return f"{section}.{close[0]}"
    close = difflib.get_close_matches(key, [*bare, *ALIASES], n=1)
    return (bare.get(close[0]) or ALIASES[close[0]]) if close else None


def _list_keys(section: str) -> str:
    return ", ".join(SECTIONS[section].model_fields)
