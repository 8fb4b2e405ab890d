"""`cluster.split = "auto"`: the planner's best split of the GPUs there are, as settings of a run."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from olmorl.config.explain import explain
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.controller.placement import Node, gpu_types
from olmorl.planner.costs import DEVICES
from olmorl.planner.plan import Plan, Question, plans, simulate
from olmorl.planner.question import question_of

MEND = "set inference.workers and learner.workers, and leave cluster.split out"


def settings_of(plan: Plan) -> dict[str, int]:
    settings = {
        "inference.workers": plan.inference_gpus // plan.tensor_parallel,
        "inference.tensor_parallel": plan.tensor_parallel,
        "inference.max_num_seqs": plan.slots,
        "inference.kv_cache_tokens": plan.kv_cache_tokens,
        "learner.workers": plan.learner_gpus,
    }
    return {key: value for key, value in settings.items() if (key, value) != ("inference.tensor_parallel", 1)}


def as_overrides(plan: Plan) -> list[str]:
    return [f"{key}={value}" for key, value in settings_of(plan).items()]


def given(config: Config, question: Question) -> Plan:
    """What the planner expects of the split that the config has.

    Raises:
        ConfigError: it has none, or no engine could be cut like that.
    """
    inference = config.inference
    if config.cluster.split == "auto":
        raise ConfigError("cluster.split = 'auto' gives no split, it has one planned; leave out --as-given")
    if not question.shape.cut_by(inference.tensor_parallel):
        raise ConfigError(
            f"inference.tensor_parallel = {inference.tensor_parallel} does not divide the heads and features of "
            f"{question.shape.name}"
        )
    gpus = inference.workers * inference.tensor_parallel
    if (kv := inference.kv_cache_tokens) == "auto":
        kv = None
    return simulate(question, gpus, inference.tensor_parallel, inference.max_num_seqs, kv_cache_tokens=kv)


def split(config: Config, nodes: Sequence[Node]) -> Config:
    """The config with the planner's best split of these nodes in place of cluster.split = "auto".

    Raises:
        ConfigError: there is nothing that a plan could divide, or the model fits on no split.
    """
    gpus = [int(node.gpus) for node in nodes if node.gpus]
    kind = device_to_split(nodes)
    question = question_of(config, num_devices=sum(gpus), device_name=kind, node_size=min(gpus))
    best = plans(question)[0]
    settings: dict[str, Any] = {**settings_of(best), "cluster.split": "given"}
    if "kv_cache_tokens" in config.inference.model_fields_set:
        del settings["inference.kv_cache_tokens"]
    elif best.tensor_parallel == 1:  # then the worker measures what there is room for
        settings["inference.kv_cache_tokens"] = "auto"
    values = config.model_dump(exclude_unset=True)
    for key, value in settings.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, dict.fromkeys(settings, "the planner's split"))) from None


def device_to_split(nodes: Sequence[Node]) -> str:
    """The one kind of GPU there is, under the planner's name. Raises ConfigError as `split` does."""
    kinds = gpu_types(nodes)
    if not kinds:
        raise ConfigError(f"cluster.split = 'auto' divides GPUs, and there are none here; {MEND}")
    kind = kinds[0].lower().removesuffix("-80g")  # as Ray may tell one A100 from the other
    if len(kinds) > 1 or kind not in DEVICES:
        raise ConfigError(
            f"cluster.split = 'auto' plans for GPUs of one kind, {', '.join(DEVICES)}; here are {', '.join(kinds)}; "
            f"{MEND}"
        )
    return kind
