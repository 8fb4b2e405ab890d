"""The policy: a transformers causal model whose forward returns logprobs.

The logprobs are computed inside `forward` because a submodule of a sharded root must not be called from outside: only
the root's own forward brings its parameters together.

Parameters are held in float32, whatever the compute dtype: an update of 1e-6 is lost in bfloat16.

Shapes: N tokens of a packed micro-batch, R positions to be scored, E width.
"""

import logging
import math

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from learner.attention import DocumentLayout
from learner.logprobs import chunked_logprobs
from olmorl.contract.errors import ModelError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # config keys: of a layer
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


class PolicyModel(nn.Module):
    def __init__(self, causal_lm: PreTrainedModel, *, chunk_tokens: int = 1024) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_tokens = chunk_tokens
        embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
        self.tied = next(embedding.parameters()) is next(head.parameters())
        self.num_parameters = _count(causal_lm)
        self.num_head_parameters = _count(head)
        self.num_body_parameters = self.num_parameters - _count(embedding) - (0 if self.tied else _count(head))
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
    everywhere = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
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
