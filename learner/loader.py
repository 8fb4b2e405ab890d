"""From a Hugging Face folder to a policy whose shards lie on their ranks.

Rank 0 alone reads the weights, so that the model stands whole once in all, not once a rank. The others build it without
any and get them layer by layer as it is sharded, its buffers too: what a model computes for itself at load is computed
once.
"""

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from learner.agreement import raise_together
from learner.attention import ATTENTION_NAME, DocumentLayout, register
from learner.model import PolicyModel, decoder_layers
from olmorl.contract.errors import ModelError

PROBE_TOKENS = 4
PROBE_TOLERANCE = 1e-2  # nats; behind a first token float32 itself may be some 1e-3 off
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # config keys of heads we do not compute


def load_sharded(
    path: str,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    chunk_tokens: int = 1024,
    activation_checkpointing: bool = False,
    compile: bool = False,
    patient: dist.ProcessGroup | None = None,
) -> PolicyModel:
    """`load_policy` on rank 0, and each rank its shards. Collective: a ModelError of rank 0 is everybody's.

    The others wait in `patient` for as long as the disk takes.
    """
    register()
    policy, error = None, None
    if dist.get_rank() == 0:
        try:
            policy = load_policy(path, chunk_tokens=chunk_tokens)
        except ModelError as caught:
            error = caught
    raise_together(error, group=patient)
    found: list[Any] = [None, None] if policy is None else [policy.config, _tensors(policy)]
    dist.broadcast_object_list(found, src=0)
    config, tensors = found
    if policy is None:
        policy = PolicyModel(_without_weights(config), chunk_tokens=chunk_tokens)
    differing = sorted({name for name, _ in tensors.items() ^ _tensors(policy).items()})
    if differing:
        error = ModelError(f"{path} holds another model than its config.json makes, in {', '.join(differing[:5])}")
    raise_together(error)
    wrap_layers(policy, activation_checkpointing=activation_checkpointing, compile=compile)
    return shard(policy, mesh, compute_dtype=compute_dtype)


def load_policy(path: str, *, chunk_tokens: int = 1024) -> PolicyModel:
    """Read a Hugging Face folder or hub id, in float32, whole."""
    register()
    try:
        config = AutoConfig.from_pretrained(path)
        _check_config(config)
        causal_lm = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the model {path!r}: {error}") from error
    if not causal_lm._supports_attention_backend:
        raise ModelError(
            f"{type(causal_lm).__name__} ({path}) does its own attention, so documents cannot be packed without "
            "seeing each other; use a model that supports transformers' attention interface (Llama, OLMo 2, Qwen, ...)"
        )
    causal_lm.eval()  # with dropout the policy that is trained is not the one that spoke
    policy = PolicyModel(causal_lm, chunk_tokens=chunk_tokens)
    causal_lm.config.tie_word_embeddings = policy.tied  # a head of its own in the weights stands against the config
    _check_packing(policy, path)
    return policy


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    return causal_lm.eval()


def _tensors(policy: PolicyModel) -> dict[str, tuple[torch.Size, torch.dtype]]:
    named = chain(policy.named_parameters(), policy.named_buffers())
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named}


def _check_config(config: PreTrainedConfig) -> None:
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{config.name_or_path} is quantised, and only dense weights are trained: give the model it was made from, "
            "and inference.quantization for rollouts in fewer bits"
        )
    for key in LOGIT_CHANGES:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise ModelError(f"the model's config has {key} = {getattr(config, key)}, which the learner does not apply")


@torch.no_grad()
def _check_packing(policy: PolicyModel, path: str) -> None:
    """Two documents laid together must say what the model says of the second alone. Some families carry a state from
    token to token whatever the attention, or do more behind their last layer than the product with the head."""
    tokens = torch.arange(2 * PROBE_TOKENS) % policy.config.vocab_size
    own = tokens[PROBE_TOKENS:]
    positions = torch.arange(PROBE_TOKENS)
    scored = torch.arange(PROBE_TOKENS + 1, 2 * PROBE_TOKENS)
    starts = PROBE_TOKENS * np.arange(3)
    cpu = torch.device("cpu")
    name = type(policy.causal_lm).__name__
    try:
        packed, _ = policy(
            tokens,
            positions.repeat(2),
            DocumentLayout.from_starts(starts, device=cpu),
            scored_R=scored,
            context_R=scored - 1,
            temperature=1.0,
        )
        layout = DocumentLayout.from_starts(starts[:2], device=cpu)
        out = policy.causal_lm(input_ids=own[None], position_ids=positions[None], use_cache=False, layout=layout)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ModelError(f"{name} ({path}) cannot be trained on packed documents: {error}") from error
    alone = out.logits[0, :-1].log_softmax(-1).gather(-1, own[1:, None])[:, 0]
    difference = (packed - alone).abs().max().item()
    if not difference < PROBE_TOLERANCE:
        raise ModelError(
            f"{name} ({path}) says another thing of a document packed behind one (by {difference:.2g} nats): "
            "it carries a state over, or has a head of its own kind; the learner cannot train it"
        )


def wrap_layers(policy: PolicyModel, *, activation_checkpointing: bool, compile: bool) -> None:
    """Compiled inside, checkpointed outside, and around both what FSDP hangs on the call of a module. Transformers'
    own checkpointing asks for training mode, which would bring dropout back."""
    for layer in decoder_layers(policy):
        if compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def shard(policy: PolicyModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> PolicyModel:
    """Shard every decoder layer, then the rest, over `mesh`. Gradients are summed over ranks, never averaged.

    A mesh of two dimensions is (replicas, shards): gathers stay among the shards, sums go over both.

    On one rank parameters stay together after the forward: there is nobody to share the memory with.
    """
    if compute_dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    else:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    device = torch.device(mesh.device_type)
    fully = partial(fully_shard, mesh=mesh, mp_policy=precision, reshard_after_forward=mesh.size() > 1)
    for layer in decoder_layers(policy):
        _take_from_rank_0(layer.parameters(), device=device)
        fully(layer)
    rest = (parameter for parameter in policy.parameters() if not isinstance(parameter, DTensor))
    _take_from_rank_0(chain(rest, policy.buffers()), device=device)
    fully(policy)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else gloo is asked for a reduction that only NCCL has
    return policy


def _take_from_rank_0(tensors: Iterable[Tensor], *, device: torch.device) -> None:
    """Whole, on `device`, in place: modules that share a tensor go on sharing it. Collective."""
    for tensor in tensors:
        if tensor.is_meta:
            room = torch.empty_like(tensor, device=device)
            torch.utils.swap_tensors(tensor, nn.Parameter(room) if isinstance(tensor, nn.Parameter) else room)
        else:
            tensor.data = tensor.data.to(device)
        dist.broadcast(tensor.detach(), src=0)
