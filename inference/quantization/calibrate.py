"""A model's matrices quantised one layer after the other, on tokens that went through the layers quantised before.

Query, key and value read the same tokens, gate and up too: each pair or triple is one matrix here, as in the decoder.

Suffixes: T tokens, M hidden size, K inputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from inference.model.decoder import Decoder, LayerWeights
from inference.model.kv_pools import KVPools
from inference.model.step_tensors import moved
from inference.quantization.awq import best_scale
from inference.quantization.gptq import gptq
from inference.quantization.grid import Grid, Quantized, output_error, round_to_nearest
from inference.step_batch import dense_batch

Method = Literal["nearest", "gptq", "awq"]
PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class MatrixReport:
    name: str
    nearest_error: float
    """of the matrix's output on the calibration tokens, relative, had its weights been rounded to nearest"""
    error: float


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    report: MatrixReport
    modules: dict[str, Quantized]
    """by the name of the module in the checkpoint"""


@torch.inference_mode()
def quantize_layers(
    decoder: Decoder, sequences: Sequence[np.ndarray], *, method: Method, grid: Grid, desc_act: bool = False
) -> Iterator[QuantizedMatrix]:
    """Four matrices a layer. When all are taken, `decoder` (dense, float32) holds the weights that they stand for, and
    with AWQ whatever else had to be scaled."""
    assert decoder.dtype == torch.float32 and decoder.quantization is None, "calibration needs the dense weights"
    batch, num_blocks = dense_batch([np.asarray(sequence) for sequence in sequences], block_size=_BLOCK_SIZE)
    batch = moved(batch, decoder.device)
    assert batch.tensors is not None
    one_layer = replace(decoder.arch, layers=decoder.arch.layers[:1])
    pools = _EveryLayer(one_layer, num_blocks, None, block_size=_BLOCK_SIZE, dtype=torch.float32, device=decoder.device)
    x_TM = decoder.embed(batch.tensors.token_ids_T)
    for index, layer in enumerate(decoder.layers):
        hessians: dict[str, torch.Tensor] = {}

        def watch(field: str, tokens_TK: torch.Tensor, found: dict[str, torch.Tensor] = hessians) -> None:
            found[field] = tokens_TK.T @ tokens_TK

        decoder.layer_torch(index, x_TM, batch, pools, watch)
        nearest = {
            field: output_error(weight, round_to_nearest(weight, grid).dense(), hessians[field])
            for field, weight in _matrices(layer)
        }
        if method == "awq":
            _scale_inputs(decoder, layer, hessians, grid)
        for field, weight in _matrices(layer):
            if method == "gptq":
                found = gptq(weight, hessians[field], grid, desc_act=desc_act)
            else:
                found = round_to_nearest(weight, grid)
            dense = found.dense()
            name = f"model.layers.{index}.{field}"
            report = MatrixReport(name, nearest[field], output_error(weight, dense, hessians[field]))
            weight.copy_(dense)
            yield QuantizedMatrix(report, dict(_split(decoder, index, field, found)))
        x_TM = decoder.layer_torch(index, x_TM, batch, pools)


class _EveryLayer(KVPools):
    """Keys and values of one layer, which the next may overwrite: all its tokens are computed at once."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().layer(0)


def _matrices(layer: LayerWeights) -> list[tuple[str, torch.Tensor]]:
    return [(field, getattr(layer, field)) for field in PROJECTIONS]


def _split(decoder: Decoder, index: int, field: str, found: Quantized) -> Iterator[tuple[str, Quantized]]:
    first = 0
    for projection in PROJECTIONS[field]:
        module = f"model.layers.{index}.{projection}"
        count = len(decoder.tensors[f"{module}.weight"])
        yield module, found.outputs(first, count)
        first += count


def _scale_inputs(decoder: Decoder, layer: LayerWeights, hessians: dict[str, torch.Tensor], grid: Grid) -> None:
    """Weights and what they read, so that the product stays; `hessians` follow."""
    for field, weight in _matrices(layer):
        makers = _makers(decoder, layer, field)
        if not makers:
            continue
        scale_K = best_scale(weight, hessians[field], grid)
        weight *= scale_K
        for part in makers:
            part /= scale_K if part.ndim == 1 else scale_K[:, None]
        hessians[field] = hessians[field] / (scale_K[:, None] * scale_K)


def _makers(decoder: Decoder, layer: LayerWeights, field: str) -> list[torch.Tensor]:
    """What makes the inputs of a matrix, a row each; nothing where no row is an input's alone: behind a residual, or
    where several query heads share a value."""
    arch = decoder.arch
    if field in ("qkv", "gate_up"):
        norm = layer.attention_norm if field == "qkv" else layer.mlp_norm
        return [norm] if arch.norms == "pre" else []
    if field == "down":
        weight, bias, count = layer.gate_up, layer.gate_up_bias, arch.intermediate_size
    elif arch.num_heads == arch.num_kv_heads:
        weight, bias, count = layer.qkv, layer.qkv_bias, arch.num_kv_heads * arch.head_dim
    else:
        return []
    # Up lies behind gate, values behind queries and keys.
    return [part[-count:] for part in (weight, bias) if part is not None]
