"""A weight update that is complete and checked but not yet served.

An update is refused as a whole before it can touch a weight: names, shapes and finiteness are judged here; what is
left for the moment between two engine steps is a copy in place.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from inference.model.decoder import Decoder, Hold
from inference.model.wire import EMBEDDING, HEAD, checksum
from olmorl.contract.errors import WeightUpdateError
from olmorl.contract.weights import TensorSpec, combine_checksums


@dataclass(slots=True)
class StagedUpdate:
    tensors: dict[str, torch.Tensor]
    """as the decoder stores them, by key of its `tensors`"""
    checksums: dict[str, int] = field(default_factory=dict)
    """of what came, before it was quantised"""
    in_place: bool = False
    """the weights hold it already, and there is nothing to copy"""

    def differs_from(self, decoder: Decoder) -> list[str]:
        """Names of what `decoder`, this rank's part, stores otherwise, once it should store this."""
        weights = decoder.tensors
        return [
            name
            for name, tensor in self.tensors.items()
            if not _same_bytes(decoder.part(name, tensor).to(weights[name]), weights[name])
        ]


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of tensors alike in shape and type. Eight bytes at a time where they lie so: as float32, twice as long."""
    both = (one, other)
    if all(x.is_contiguous() and x.nbytes % 8 == 0 and x.data_ptr() % 8 == 0 for x in both):
        one, other = (x.view(-1).view(torch.int64) for x in both)
    return torch.equal(one, other)


def stage_tensors(
    named: Iterable[tuple[str, torch.Tensor]],
    specs: tuple[TensorSpec, ...],
    *,
    device: torch.device,
    hold: Hold | None = None,
) -> StagedUpdate:
    """Copy and cast everything an update brings, as `hold` stores it. WeightUpdateError names what is wrong."""
    wanted = {spec.name: spec for spec in specs}
    update = StagedUpdate({})
    staged = update.tensors
    head: torch.Tensor | None = None
    for name, tensor in named:
        if name == HEAD and HEAD not in wanted:
            head = tensor
            continue
        if name not in wanted:
            raise WeightUpdateError(f"tensor {name!r} is not part of the model; nothing was changed")
        if name in staged:
            raise WeightUpdateError(f"tensor {name!r} is given twice; nothing was changed")
        if not isinstance(tensor, torch.Tensor):
            raise WeightUpdateError(f"{name!r} is a {type(tensor).__name__}, not a tensor; nothing was changed")
        cast = check_tensor(tensor.detach(), wanted[name], device=device, copy=True)
        if hold is None:
            staged[name] = cast
        else:
            staged |= hold(name, cast)
            update.checksums[name] = checksum(cast)
    missing = wanted.keys() - staged.keys()
    if missing:
        raise WeightUpdateError(f"{len(missing)} tensors are missing, among them {min(missing)!r}; nothing was changed")
    if head is not None:
        embedding = staged[EMBEDDING]
        if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
            raise WeightUpdateError(f"the head is tied: {HEAD!r} must equal {EMBEDDING!r}; nothing was changed")
    return update


def check_tensor(tensor: torch.Tensor, spec: TensorSpec, *, device: torch.device, copy: bool) -> torch.Tensor:
    """`tensor` in the model's dtype, on its device, of the right shape and finite."""
    if tuple(tensor.shape) != spec.shape:
        raise WeightUpdateError(
            f"tensor {spec.name!r} has shape {tuple(tensor.shape)}; expected {spec.shape}; nothing was changed"
        )
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_meta:  # what a commit could not copy
        raise WeightUpdateError(
            f"tensor {spec.name!r} is {tensor.layout}, {tensor.dtype} on {tensor.device}; expected real values, dense; "
            "nothing was changed"
        )
    cast = tensor.to(device=device, dtype=getattr(torch, spec.dtype), copy=copy)
    if not _all_finite(cast):
        raise WeightUpdateError(f"tensor {spec.name!r} holds values that are not finite; nothing was changed")
    return cast


def _all_finite(tensor: torch.Tensor) -> bool:
    """One infinity or NaN makes the sum one; the sum alone may overflow, so then each value is looked at. The sum is
    fifty times as fast."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def model_checksum(
    tensors: dict[str, torch.Tensor], specs: tuple[TensorSpec, ...], known: Mapping[str, int] = MappingProxyType({})
) -> str:
    """`known` checksums are taken as they are: of tensors that are stored as something else than what came."""
    names = (spec.name for spec in specs)
    return combine_checksums({n: known[n] if n in known else checksum(tensors[n]) for n in names}, specs)
