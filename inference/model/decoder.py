"""One decoder for every family. Where they differ, the architecture has a switch.

Projections that read the same input are stored as one matrix (query, key and value; gate and up). `tensors` gives
each its Hugging Face name as a view, so that loading, weight updates and checksums never see the fusion, and an
update in place reaches the fused matrix. Quantised, these views are rows of bytes (`inference.quantization.formats`),
and what comes under the name is rounded on its way in (`Decoder.hold`).

One of several ranks holds its part of each tensor (`shards`, see `inference.model.sharding`); dimensions below are
those of the whole model unless they are said to be local.

Suffixes: T tokens, M hidden size, R wanted rows, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from inference.model import kv_int8
from inference.model.architecture import Architecture
from inference.model.arena import Arena
from inference.model.attention import AttentionInput, attend
from inference.model.kv_pools import KVPools
from inference.model.layers import gated_silu, head_logits, linear, rms_norm, rope_table
from inference.model.rope import Rope
from inference.model.sharding import Shard, check_divisible, local_architecture, shard_of
from inference.model.step_tensors import moved
from inference.model.tensor_parallel import ALONE, TensorParallel
from inference.model.wire import EMBEDDING, HEAD, checksum
from inference.quantization.formats import FORMATS, Format
from inference.step_batch import StepBatch
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import Kernels, Quantization
from olmorl.contract.weights import TensorSpec

if TYPE_CHECKING:
    from inference.kernels.cpu_team import Team
    from inference.model.compiled_decoder import CompiledDecoder
    from inference.model.gpu_decoder import GpuDecoder

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
        ranks: TensorParallel = ALONE,
        quantization: Quantization | None = None,
        quantize_head: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`kv_dtype` None: that of the model."""
        check_divisible(arch, ranks.size)
        self.arch = arch
        self.ranks = ranks
        self.local = local_architecture(arch, ranks.size)
        self.shards: dict[str, Shard] = {}
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = device
        self.quantization = quantization
        self.tensors: dict[str, torch.Tensor] = {}
        """what the model computes with"""
        self.lost_checksums: dict[str, int] = {}
        """of tensors that are stored as something else than what came, which cannot be summed again"""
        self._arena = Arena(dtype=dtype, device=device)
        self._format = None if quantization is None else FORMATS[quantization]
        if self._format is not None:
            self._row_arena = Arena(dtype=self._format.dtype, device=device)
        self._rope_tables: dict[Rope, torch.Tensor] = {}
        self.embedding = self._tensor(EMBEDDING, arch.vocab_size, arch.hidden_size)
        self.layers = [self._layer(index, max_model_len) for index in range(len(arch.layers))]
        self.norm = self._tensor("model.norm.weight", arch.hidden_size)
        self.head = self._head(quantize_head)
        self.compiled = _compiled(self, max_model_len) if kernels == "auto" and ranks.size == 1 else None
        self.gpu = _gpu(self, kernels)

    @property
    def team(self) -> "Team | None":
        """The threads of the compiled kernels; None where torch computes."""
        return None if self.compiled is None else self.compiled.team

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What an update must carry, in the order of the model."""
        dtype = str(self.dtype).removeprefix("torch.")
        return tuple(TensorSpec(name, shard.shape, dtype) for name, shard in self.shards.items())

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shard.shape) for shard in self.shards.values())

    @property
    def num_resident_parameters(self) -> int:
        """On all ranks together: what is replicated counts as often as it is there."""
        return sum(
            math.prod(self.shard(name, rank).local_shape) for name in self.shards for rank in range(self.ranks.size)
        )

    @property
    def streamed_bytes(self) -> int:
        """Of this rank's weights that every step reads: all but an embedding that is not the head too."""
        looked_up = 0 if self.head is self.embedding else self.embedding.nbytes
        return sum(tensor.nbytes for tensor in self.tensors.values()) - looked_up

    @property
    def kv_head_bytes(self) -> int:
        """Of one token's key or value of one head."""
        scale = kv_int8.SCALE_BYTES if self.kv_dtype == torch.int8 else 0
        return self.arch.head_dim * self.kv_dtype.itemsize + scale

    @property
    def capturable(self) -> bool:
        """Whether `forward` of a batch whose tensors are on the device looks at nothing on the host."""
        return self.device.type == "cpu" or (self.gpu is not None and self.ranks.size == 1)

    @property
    def hold(self) -> Hold | None:
        """None where every tensor is stored as it comes."""
        return None if self.quantization is None else self._hold

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy in this rank's part of one tensor of `specs`, cast; no shape is checked."""
        if self.hold is None:
            self.tensors[name].copy_(self.part(name, tensor))
            return
        cast = tensor.to(device=self.device, dtype=self.dtype)
        for key, held in self.hold(name, cast).items():
            self.tensors[key].copy_(held)
        if self._is_quantized(name):
            self.lost_checksums[name] = checksum(cast)

    def _hold(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self._format is not None
        held = {name: self._format.quantize_rows(tensor) if self._is_quantized(name) else tensor}
        if name == EMBEDDING and self.arch.tied and HEAD in self.tensors:
            held[HEAD] = self._format.quantize_rows(tensor)
        return held

    def _is_quantized(self, name: str) -> bool:
        return self._format is not None and self.tensors[name].dtype == self._format.dtype

    def part(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """What of a whole tensor, in the form it is stored in, this rank holds: a view."""
        return stored if self.ranks.size == 1 else self.shards[name].of(stored)

    def shard(self, name: str, rank: int) -> Shard:
        return shard_of(name, self.shards[name].shape, self.arch, rank=rank, size=self.ranks.size)

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        """By Hugging Face name; on one of several ranks copies, and only the leader's are whole. All must join in."""
        return self.tensors if self.ranks.size == 1 else {name: self._collect(name) for name in self.tensors}

    def _collect(self, name: str) -> torch.Tensor:
        whole = torch.empty(self.shards[name].shape if self.ranks.rank == 0 else 0, dtype=self.dtype)
        for rank in range(self.ranks.size):
            shard = self.shard(name, rank)
            mine = rank == self.ranks.rank
            part = self.tensors[name] if mine else torch.empty(shard.local_shape, dtype=self.dtype, device=self.device)
            self.ranks.broadcast(part.view(torch.uint8), source=rank)
            if self.ranks.rank == 0:
                shard.of(whole).copy_(part)
        return whole

    def forward(self, batch: StepBatch, pools: KVPools) -> torch.Tensor:
        """[T, M] after the final norm; keys and values of the step are in `pools`."""
        if self.compiled is not None:
            return self.compiled.forward(batch, pools)
        if self.gpu is not None:
            return self.gpu.forward(batch, pools)
        return self.forward_torch(batch, pools)

    def forward_torch(self, batch: StepBatch, pools: KVPools) -> torch.Tensor:
        batch = moved(batch, self.device)
        assert batch.tensors is not None
        x_TM = self.embed(batch.tensors.token_ids_T)
        for index in range(len(self.layers)):
            x_TM = self.layer_torch(index, x_TM, batch, pools)
        return rms_norm(x_TM, self.norm, self.arch.norm_eps)

    def layer_torch(self, index: int, x_TM: torch.Tensor, batch: StepBatch, pools: KVPools) -> torch.Tensor:
        """[T, M] after one layer; the batch must be on the device."""
        for _, y_TM in self.layer_stages(index, x_TM, batch, pools):
            x_TM = y_TM
        return x_TM

    def layer_stages(
        self, index: int, x_TM: torch.Tensor, batch: StepBatch, pools: KVPools
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each field of `LayerWeights` with what it is about to be multiplied with; then what leaves the layer. Between
        two of them the weights behind may change."""
        layer, eps, pre = self.layers[index], self.arch.norm_eps, self.arch.norms == "pre"
        y_TM = rms_norm(x_TM, layer.attention_norm, eps) if pre else x_TM
        yield "qkv", y_TM
        qkv_TX = linear(y_TM, layer.qkv, layer.qkv_bias)
        step = batch if layer.attention.window is None else batch.windowed or batch
        y_TM = attend(qkv_TX, layer.attention, *pools.layer(index), step)
        yield "out", y_TM
        y_TM = self.summed_linear(y_TM, layer.out, layer.out_bias)
        x_TM = x_TM + (y_TM if pre else rms_norm(y_TM, layer.attention_norm, eps))
        y_TM = rms_norm(x_TM, layer.mlp_norm, eps) if pre else x_TM
        yield "gate_up", y_TM
        y_TM = gated_silu(linear(y_TM, layer.gate_up, layer.gate_up_bias))
        yield "down", y_TM
        y_TM = self.summed_linear(y_TM, layer.down, layer.down_bias)
        yield "", x_TM + (y_TM if pre else rms_norm(y_TM, layer.mlp_norm, eps))

    def logits(self, hidden_RM: torch.Tensor) -> torch.Tensor:
        """[R, V] float32, valid until the next call; rows need not be contiguous.

        On a follower they are its part, and `hidden_RM` gives the shape alone: the leader's is taken.
        """
        if self.compiled is not None:
            return self.compiled.logits(hidden_RM)
        hidden_RM = self.ranks.broadcast(hidden_RM.contiguous())
        logits = head_logits if self.gpu is None else self.gpu.logits
        return self.ranks.gather_columns(logits(hidden_RM, self.head), self.arch.vocab_size)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            return F.embedding(token_ids_T, self.embedding)
        shard = self.shards[EMBEDDING]
        local_T = self.ranks.broadcast(token_ids_T) - shard.start  # ids may be known on the leader's device alone
        here_T = (local_T >= 0) & (local_T < shard.length)
        x_TM = F.embedding(local_T.clamp(0, shard.length - 1), self.embedding)
        return self.ranks.sum(x_TM.masked_fill_(~here_T[:, None], 0))

    def summed_linear(self, x_TX: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The sum over ranks; the bias is whole on each and counts once."""
        if self.ranks.size == 1:
            return linear(x_TX, weight, bias)
        y_TM = self.ranks.sum(linear(x_TX, weight))
        return y_TM if bias is None else y_TM + bias

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
                self.local.num_heads,
                self.local.num_kv_heads,
                arch.head_dim,
                q_norm,
                k_norm,
                arch.qk_norm,
                arch.norm_eps,
                self._rope_table(arch.layers[index].rope, max_model_len),
                arch.layers[index].window,
                self.ranks,
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
        self.tensors[HEAD] = self._matrix(arch.vocab_size, arch.hidden_size)
        if not arch.tied:
            self._cut(HEAD, arch.vocab_size, arch.hidden_size)
        return self.tensors[HEAD]

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        self.tensors[name] = self._arena.tensor(*self._cut(name, *shape).local_shape)
        return self.tensors[name]

    def _matrix(self, num_rows: int, num_features: int) -> torch.Tensor:
        form: Format | None = self._format
        if form is None:
            return self._arena.tensor(num_rows, num_features)
        if num_features > form.max_features:
            raise ConfigError(
                f"quantization {self.quantization!r} sums {form.max_features} features at most; this model has "
                f"{num_features}"
            )
        return self._row_arena.tensor(num_rows, form.row_bytes(num_features))

    def _cut(self, name: str, *shape: int) -> Shard:
        self.shards[name] = shard_of(name, shape, self.arch, rank=self.ranks.rank, size=self.ranks.size)
        return self.shards[name]

    def _fused(
        self, parts: list[tuple[str, int]], in_features: int, *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One matrix (and bias) for all `parts`, each named as a view of its rows."""
        weights = [self._cut(f"{name}.weight", size, in_features).local_shape for name, size in parts]
        num_rows, num_features = sum(rows for rows, _ in weights), weights[0][1]
        weight = self._matrix(num_rows, num_features)
        biases = [self._cut(f"{name}.bias", size).local_shape[0] for name, size in parts] if bias else []
        bias_tensor = self._arena.tensor(sum(biases)) if bias else None
        for kind, whole in (("weight", weight), ("bias", bias_tensor)):
            if whole is not None:
                sizes = [self.shards[f"{name}.{kind}"].local_shape[0] for name, _ in parts]
                for (name, _), view in zip(parts, whole.split(sizes), strict=True):
                    self.tensors[f"{name}.{kind}"] = view
        return weight, bias_tensor


# Each backend brings its compiler, numba or Triton, and a machine may have one of them only.


def _compiled(decoder: Decoder, max_model_len: int) -> "CompiledDecoder | None":
    if decoder.device.type != "cpu":
        return None
    from inference.model.compiled_decoder import CompiledDecoder, can_compile

    quantized = decoder.quantization is not None
    if not can_compile(decoder.arch, dtype=decoder.dtype, device=decoder.device, quantized=quantized):
        return None
    return CompiledDecoder(decoder, max_model_len=max_model_len, threads=torch.get_num_threads())


def _gpu(decoder: Decoder, kernels: Kernels) -> "GpuDecoder | None":
    installed = find_spec("triton") is not None
    if kernels == "triton" and not installed:
        raise ConfigError("kernels is 'triton', which is not installed here: pip install triton (Linux on x86-64)")
    if kernels == "triton" or (kernels == "auto" and decoder.device.type == "cuda" and installed):
        from inference.model.gpu_decoder import GpuDecoder

        return GpuDecoder(decoder)
    return None
