"""One decoder for every family. Where they differ, the architecture has a switch.

Projections that read the same input are stored as one matrix (query, key and value; gate and up). `tensors` gives
each its Hugging Face name as a view, so that loading, weight updates and checksums never see the fusion, and an
update in place reaches the fused matrix. With int8 these views are rows of int8 (`inference.quantization.int8`), and
what comes under the name is quantised on its way in (`Decoder.hold`).

Suffixes: T tokens, M hidden size, R wanted rows, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from inference.kernels.cpu_team import Team
from inference.model.architecture import Architecture
from inference.model.arena import Arena
from inference.model.attention import AttentionInput, attend
from inference.model.compiled_decoder import CompiledDecoder, can_compile
from inference.model.kv_pools import KVPools
from inference.model.layers import gated_silu, linear, rms_norm, rope_table
from inference.model.rope import Rope
from inference.model.wire import EMBEDDING, HEAD, checksum
from inference.quantization.int8 import MAX_FEATURES, quantize_rows, row_bytes
from inference.step_batch import StepBatch
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import Kernels, Quantization
from olmorl.contract.weights import TensorSpec

Hold = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""What a tensor under its name is stored as, by key of `Decoder.tensors`; may share its memory"""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    attention: AttentionInput


class Decoder:
    def __init__(
        self,
        arch: Architecture,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        kernels: Kernels = "auto",
        quantization: Quantization | None = None,
        quantize_head: bool = False,
    ) -> None:
        self.arch = arch
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self.tensors: dict[str, torch.Tensor] = {}
        """what the model computes with"""
        self.lost_checksums: dict[str, int] = {}
        """of tensors that are stored as something else than what came, which cannot be summed again"""
        self._specs: list[TensorSpec] = []
        self._arena = Arena(dtype=dtype, device=device)
        self._int8_arena = Arena(dtype=torch.int8, device=device)
        self._rope_tables: dict[Rope, torch.Tensor] = {}
        self.embedding = self._tensor(EMBEDDING, arch.vocab_size, arch.hidden_size)
        self.layers = [self._layer(index, max_model_len) for index in range(len(arch.layers))]
        self.norm = self._tensor("model.norm.weight", arch.hidden_size)
        self.head = self._head(quantize_head)
        self.compiled: CompiledDecoder | None = None
        if kernels == "auto" and can_compile(arch, dtype=dtype, device=device, quantized=quantization is not None):
            self.compiled = CompiledDecoder(self, max_model_len=max_model_len, threads=torch.get_num_threads())

    @property
    def team(self) -> Team | None:
        """The threads of the compiled kernels; None where torch computes."""
        return None if self.compiled is None else self.compiled.team

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What an update must carry, in the order of the model."""
        return tuple(self._specs)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(spec.shape) for spec in self._specs)

    @property
    def streamed_bytes(self) -> int:
        """Of weights that every step reads: all but an embedding that is not the head too."""
        looked_up = 0 if self.head is self.embedding else self.embedding.nbytes
        return sum(tensor.nbytes for tensor in self.tensors.values()) - looked_up

    @property
    def hold(self) -> Hold | None:
        """None where every tensor is stored as it comes."""
        return None if self.quantization is None else self._hold

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy in one tensor of `specs`, cast; no shape is checked."""
        if self.hold is None:
            self.tensors[name].copy_(tensor)
            return
        cast = tensor.to(device=self.device, dtype=self.dtype)
        for key, held in self.hold(name, cast).items():
            self.tensors[key].copy_(held)
        if self.tensors[name].dtype == torch.int8:
            self.lost_checksums[name] = checksum(cast)

    def _hold(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        held = {name: quantize_rows(tensor) if self.tensors[name].dtype == torch.int8 else tensor}
        if name == EMBEDDING and self.arch.tied and HEAD in self.tensors:
            held[HEAD] = quantize_rows(tensor)
        return held

    def forward(self, batch: StepBatch, pools: KVPools) -> torch.Tensor:
        """[T, M] after the final norm; keys and values of the step are in `pools`."""
        if self.compiled is not None:
            return self.compiled.forward(batch, pools)
        return self.forward_torch(batch, pools)

    def forward_torch(self, batch: StepBatch, pools: KVPools) -> torch.Tensor:
        arch, eps = self.arch, self.arch.norm_eps
        pre = arch.norms == "pre"
        windowed = batch.windowed or batch
        x_TM = F.embedding(torch.from_numpy(batch.token_ids_T).to(self.device), self.embedding)
        for index, layer in enumerate(self.layers):
            y_TM = rms_norm(x_TM, layer.attention_norm, eps) if pre else x_TM
            qkv_TX = linear(y_TM, layer.qkv, layer.qkv_bias)
            step = batch if layer.attention.window is None else windowed
            y_TM = linear(attend(qkv_TX, layer.attention, *pools.layer(index), step), layer.out, layer.out_bias)
            x_TM = x_TM + (y_TM if pre else rms_norm(y_TM, layer.attention_norm, eps))
            y_TM = rms_norm(x_TM, layer.mlp_norm, eps) if pre else x_TM
            y_TM = gated_silu(linear(y_TM, layer.gate_up, layer.gate_up_bias))
            y_TM = linear(y_TM, layer.down, layer.down_bias)
            x_TM = x_TM + (y_TM if pre else rms_norm(y_TM, layer.mlp_norm, eps))
        return rms_norm(x_TM, self.norm, eps)

    def logits(self, hidden_RM: torch.Tensor) -> torch.Tensor:
        """[R, V] float32, valid until the next call; rows need not be contiguous."""
        if self.compiled is not None:
            return self.compiled.logits(hidden_RM)
        return linear(hidden_RM, self.head).float()

    def _layer(self, index: int, max_model_len: int) -> LayerWeights:
        arch = self.arch
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        width, kv_width = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        norms = ("input", "post_attention") if arch.norms == "pre" else ("post_attention", "post_feedforward")
        qkv = [(attention + "q_proj", width), (attention + "k_proj", kv_width), (attention + "v_proj", kv_width)]
        gate_up = [(mlp + "gate_proj", arch.intermediate_size), (mlp + "up_proj", arch.intermediate_size)]
        q_norm = k_norm = None
        if arch.qk_norm is not None:
            whole = arch.qk_norm == "whole"
            q_norm = self._tensor(attention + "q_norm.weight", width if whole else arch.head_dim)
            k_norm = self._tensor(attention + "k_norm.weight", kv_width if whole else arch.head_dim)
        return LayerWeights(
            *self._fused(qkv, arch.hidden_size, bias=arch.qkv_bias),
            *self._fused([(attention + "o_proj", arch.hidden_size)], width, bias=arch.out_bias),
            *self._fused(gate_up, arch.hidden_size, bias=arch.mlp_bias),
            *self._fused([(mlp + "down_proj", arch.hidden_size)], arch.intermediate_size, bias=arch.mlp_bias),
            self._tensor(f"{prefix}{norms[0]}_layernorm.weight", arch.hidden_size),
            self._tensor(f"{prefix}{norms[1]}_layernorm.weight", arch.hidden_size),
            AttentionInput(
                arch.num_heads,
                arch.num_kv_heads,
                arch.head_dim,
                q_norm,
                k_norm,
                arch.qk_norm,
                arch.norm_eps,
                self._rope_table(arch.layers[index].rope, max_model_len),
                arch.layers[index].window,
            ),
        )

    def _rope_table(self, rope: Rope, max_model_len: int) -> torch.Tensor:
        """Layers with the same rope share one table."""
        if rope not in self._rope_tables:
            self._rope_tables[rope] = rope_table(
                rope, head_dim=self.arch.head_dim, num_positions=max_model_len, device=self.device
            )
        return self._rope_tables[rope]

    def _head(self, quantize: bool) -> torch.Tensor:
        arch = self.arch
        if not quantize:
            return self.embedding if arch.tied else self._tensor(HEAD, arch.vocab_size, arch.hidden_size)
        self.tensors[HEAD] = self._matrix(arch.vocab_size, arch.hidden_size, int8=True)
        if not arch.tied:
            self._name(HEAD, arch.vocab_size, arch.hidden_size)
        return self.tensors[HEAD]

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        self.tensors[name] = self._arena.tensor(*shape)
        self._name(name, *shape)
        return self.tensors[name]

    def _matrix(self, num_rows: int, num_features: int, *, int8: bool) -> torch.Tensor:
        if not int8:
            return self._arena.tensor(num_rows, num_features)
        if num_features > MAX_FEATURES:
            raise ConfigError(
                f"quantization 'int8' sums {MAX_FEATURES} features at most; this model has {num_features}"
            )
        return self._int8_arena.tensor(num_rows, row_bytes(num_features))

    def _name(self, name: str, *shape: int) -> None:
        self._specs.append(TensorSpec(name, shape, str(self.dtype).removeprefix("torch.")))

    def _fused(
        self, parts: list[tuple[str, int]], in_features: int, *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One matrix (and bias) for all `parts`, each named as a view of its rows."""
        sizes = [size for _, size in parts]
        weight = self._matrix(sum(sizes), in_features, int8=self.quantization == "int8")
        bias_tensor = self._arena.tensor(sum(sizes)) if bias else None
        for kind, whole in (("weight", weight), ("bias", bias_tensor)):
            if whole is not None:
                for (name, size), view in zip(parts, whole.split(sizes), strict=True):
                    self.tensors[f"{name}.{kind}"] = view
                    self._name(f"{name}.{kind}", size, *([in_features] if kind == "weight" else []))
        return weight, bias_tensor
