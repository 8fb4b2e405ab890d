"""The policy: a transformers causal model whose forward returns logprobs, sharded by FSDP2.

The logprobs are computed inside `forward` because a submodule of a sharded root must not be called from outside: only
the root's own forward brings its parameters together.

Parameters are held in float32, whatever the compute dtype: an update of 1e-6 is lost in bfloat16.

Shapes: N tokens of a packed micro-batch, R positions to be scored, E width.
"""

import logging
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from learner.attention import ATTENTION_NAME, DocumentLayout, register
from learner.logprobs import chunked_logprobs
from olmorl.contract.errors import ModelError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBE_TOKENS = 4
PROBE_TOLERANCE = 1e-2  # nats; behind a first token float32 itself may be some 1e-3 off
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # config keys: of a layer
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # config keys of heads we do not compute


class PolicyModel(nn.Module):
    def __init__(self, causal_lm: PreTrainedModel, *, chunk_tokens: int = 1024) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_tokens = chunk_tokens
        embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
        tied = next(embedding.parameters()) is next(head.parameters())
        self.num_parameters = _count(causal_lm)
        self.num_head_parameters = _count(head)
        self.num_body_parameters = self.num_parameters - _count(embedding) - (0 if tied else _count(head))
        self.num_body_parameters -= _count_idle_experts(causal_lm)
        """that a token is multiplied with: of experts those it is sent to"""

    @property
    def config(self) -> PreTrainedConfig:
        return self.causal_lm.config

    def forward(
        self,
        token_ids_N: Tensor,
        position_ids_N: Tensor,
        layout: DocumentLayout,
        *,
        scored_R: Tensor,
        context_R: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Logprob of the token at each position of `scored_R`, as what follows `context_R`, and the entropy there."""
        hidden_NE = self.causal_lm.base_model(
            input_ids=token_ids_N[None], position_ids=position_ids_N[None], use_cache=False, layout=layout
        ).last_hidden_state[0]
        head = self.causal_lm.get_output_embeddings()
        return chunked_logprobs(
            hidden_NE.index_select(0, context_R),
            head.weight,
            head.bias,
            token_ids_N.index_select(0, scored_R),
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
        )

    def hugging_face_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its Hugging Face name; a tied head goes by the name of the embedding."""
        return dict(self.causal_lm.named_parameters())


def load_policy(path: str, *, chunk_tokens: int = 1024, activation_checkpointing: bool = False) -> PolicyModel:
    """Read a Hugging Face folder or hub id, in float32."""
    register()
    try:
        config = AutoConfig.from_pretrained(path)
        _check_config(config)
        causal_lm = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        )
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"cannot load the model {path!r}: {error}") from error
    if not causal_lm._supports_attention_backend:
        raise ModelError(
            f"{type(causal_lm).__name__} ({path}) does its own attention, so documents cannot be packed without "
            "seeing each other; use a model that supports transformers' attention interface (Llama, OLMo 2, Qwen, ...)"
        )
    causal_lm.eval()  # with dropout the policy that is trained is not the one that spoke
    policy = PolicyModel(causal_lm, chunk_tokens=chunk_tokens)
    _check_packing(policy, path)
    if activation_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in decoder_layers(policy):
            layer.training = True  # of the layer itself, not of what is in it: else it checkpoints nothing
    return policy


def _check_config(config: PreTrainedConfig) -> None:
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


def shard(policy: PolicyModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> PolicyModel:
    """Shard every decoder layer, then the rest, over `mesh`. Gradients are summed over ranks, never averaged.

    A mesh of two dimensions is (replicas, shards): gathers stay among the shards, sums go over both.

    On one rank parameters stay together after the forward: there is nobody to share the memory with.
    """
    if compute_dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    else:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    reshard = mesh.size() > 1
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else gloo is asked for a reduction that only NCCL has
    return policy


def reshard(policy: PolicyModel) -> None:
    """Drop the parameters that a forward brought together.

    A forward that no backward follows leaves them standing, a second model in memory.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(parameter: Tensor, *, dtype: torch.dtype) -> Tensor:
    """A sharded parameter whole, on every rank, cast before it travels. Collective."""
    shard = parameter.detach().to(dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


def decoder_layers(policy: PolicyModel) -> nn.ModuleList:
    count = policy.config.num_hidden_layers
    for module in policy.causal_lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"{type(policy.causal_lm).__name__} has no list of {count} decoder layers")


def forward_flops(policy: PolicyModel, spans: tuple[tuple[int, int], ...], *, num_scored: int) -> float:
    """2 FLOPs per weight and token, 4 per attended pair, query head and head dimension; rows looked up are free.

    A span is (tokens read before, own tokens) of a document: what is computed twice counts once.
    """
    config = policy.config
    pairs = sum(
        _attended_pairs(before + own, window) - _attended_pairs(before, window)
        for window in layer_windows(config)
        for before, own in spans
    )
    return (
        2.0 * policy.num_body_parameters * sum(own for _, own in spans)
        + 2.0 * policy.num_head_parameters * num_scored
        + _flops_per_pair(config) * pairs
    )


def attention_tokens(policy: PolicyModel) -> float:
    """Length at which a sample's attention costs as many FLOPs as the weights; infinite where it never does.

    Of a sliding layer every token attends about a window, which is a cost per token, as that of the weights.
    """
    windows = layer_windows(policy.config)
    per_pair = _flops_per_pair(policy.config)
    per_token = 2.0 * (policy.num_body_parameters + policy.num_head_parameters)
    per_token += per_pair * sum(window for window in windows if window is not None)
    quadratic = per_pair * windows.count(None) / 2
    return per_token / quadratic if quadratic else math.inf


def _flops_per_pair(config: PreTrainedConfig) -> float:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4.0 * config.num_attention_heads * head_dim


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer, None for full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _attended_pairs(length: int, window: int | None) -> int:
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def _count_idle_experts(causal_lm: PreTrainedModel) -> int:
    """Parameters of those experts that a token is not sent to."""
    layers = [module for name, module in causal_lm.named_modules() if name.rpartition(".")[2] == "experts"]
    if not layers:
        return 0
    in_all, of_a_token = (_first_number(causal_lm.config, keys) for keys in (EXPERTS, EXPERTS_OF_A_TOKEN))
    if in_all is None or of_a_token is None:
        log.warning(
            "%s does not say in its config how many experts a token is sent to (%s): its FLOPs, and the learner's MFU, "
            "count all of them",
            type(causal_lm).__name__,
            ", ".join(EXPERTS_OF_A_TOKEN),
        )
        return 0
    return sum(map(_count, layers)) * (in_all - of_a_token) // in_all


def _first_number(config: PreTrainedConfig, keys: tuple[str, ...]) -> int | None:
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int)), None)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
