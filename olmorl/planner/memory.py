"""Do the workers of a run fit their GPUs? Arithmetic over the model's shape, in bytes.

Counted is what a worker holds for certain: weights, KV cache, optimizer. On top come activations, the staged copy of an
update, graphs, which hang on more: what does not fit here fits nowhere, and not the other way round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from olmorl.config.schema import Config
from olmorl.controller.placement import Node, Placement, gpu_types
from olmorl.planner.costs import DEVICES, Device
from olmorl.planner.plan import BYTES_PER_TRAINED_PARAMETER
from olmorl.planner.shape import ModelShape, model_shape

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one GPU of a worker holds."""

    who: str
    parts: dict[str, float]
    room: float
    gpu: str
    mend: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.room

    def __str__(self) -> str:
        parts = " + ".join(f"{size / GB:.3g} GB of {name}" for name, size in self.parts.items())
        held = f"{self.who} holds {parts}, of {self.room / GB:.3g} GB ({self.gpu})"
        return held if self.fits else f"{held}: {(self.total - self.room) / GB:.3g} GB too much; {self.mend}"


def holdings(config: Config, placement: Placement, nodes: Sequence[Node]) -> list[Holding]:
    """Of each role that is on GPUs of a kind whose memory is known.

    Raises:
        ConfigError: the shape of the model is not known here.
    """
    engine = _device(placement.inference_gpu_type, nodes) if placement.inference_device == "cuda" else None
    learner = _device(placement.learner_gpu_type, nodes) if placement.learner_device == "cuda" else None
    if engine is None and learner is None:
        return []
    size = 4 if config.model.dtype == "float32" else 2
    shape = replace(model_shape(config.model.path), element_size=size)
    found = [] if engine is None else [_of_engine(config, shape, engine)]
    return found if learner is None else [*found, _of_learner(config, placement, shape, learner)]


def _of_engine(config: Config, shape: ModelShape, device: Device) -> Holding:
    inference, longest = config.inference, config.max_model_tokens
    ranks = inference.tensor_parallel
    held = replace(shape, quantization=inference.quantization, quantize_head=inference.quantize_head).within(longest)
    one_sequence = inference.kv_cache_tokens == "auto"
    tokens = longest if inference.kv_cache_tokens == "auto" else inference.kv_cache_tokens
    slots = 1 if one_sequence else inference.max_num_seqs
    in_window = min(tokens, slots * (held.window or 0))
    seen = held.full_share * tokens + (1 - held.full_share) * in_window
    share = max(1 / ranks, 1 / held.num_kv_heads)  # heads are held more than once where there are fewer than ranks
    kv = "KV for the longest sequence" if one_sequence else f"KV for {tokens:,} tokens"
    shorter = "shorten rollout.max_response_tokens" if one_sequence else "lower inference.kv_cache_tokens"
    return Holding(
        who="an inference worker" if ranks == 1 else "each GPU of an inference worker",
        parts={"weights": held.weight_bytes / ranks, kv: seen * held.kv_bytes_per_token * share},
        room=device.memory * inference.gpu_share,
        gpu=_name(device, inference.gpu_share),
        mend=f"raise inference.tensor_parallel, {shorter}, or take GPUs with more memory",
    )


def _of_learner(config: Config, placement: Placement, shape: ModelShape, device: Device) -> Holding:
    state = shape.num_parameters * BYTES_PER_TRAINED_PARAMETER
    room = device.memory * config.learner.gpu_share
    key = "learner.workers" if placement.shard_size == placement.learner_workers else "learner.shard_size"
    return Holding(
        who="a learner",
        parts={"weights, gradients and optimizer": state / placement.shard_size},
        room=room,
        gpu=_name(device, config.learner.gpu_share),
        mend=f"raise {key} to {ceil(state / room)} or more, or take GPUs with more memory",
    )


def _name(device: Device, share: float) -> str:
    return device.name.upper() + (f", gpu_share {share:g}" if share < 1 else "")


def _device(kind: str | None, nodes: Sequence[Node]) -> Device | None:
    """The one with the most memory that a worker may get; None where one is of a kind that is not known."""
    kinds = [kind] if kind is not None else gpu_types(nodes)
    known = [[device for name, device in DEVICES.items() if name in each.lower()] for each in kinds]
    if not all(known) or not known:
        return None
    return max((device for devices in known for device in devices), key=lambda device: device.memory)
