"""A model's matrices quantised one after the other, in one pass of the calibration tokens through the model.

With GPTQ, and rounding to nearest, a matrix is replaced as soon as all tokens stand before it, and these go on through
what replaced it. With AWQ, which scales a matrix before it is multiplied with, they go through the dense model.

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
from inference.model.step_tensors import moved, tensors_of
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
_PART_TOKENS = 4096  # that are computed at once: more would only take memory


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
    parts = [dense_batch(part, block_size=_BLOCK_SIZE) for part in _parts(sequences)]
    batches = [moved(batch, decoder.device) for batch, _ in parts]
    one_layer = replace(decoder.arch, layers=decoder.arch.layers[:1])
    num_blocks = max(num_blocks for _, num_blocks in parts)
    pools = _EveryLayer(one_layer, num_blocks, None, block_size=_BLOCK_SIZE, dtype=torch.float32, device=decoder.device)
    x = [decoder.embed(tensors_of(batch, decoder.device).token_ids_T) for batch in batches]
    for index, layer in enumerate(decoder.layers):
        runs = [decoder.layer_stages(index, x_TM, batch, pools) for x_TM, batch in zip(x, batches, strict=True)]
        hessians: dict[str, torch.Tensor] = {}
        nearest: dict[str, float] = {}
        for field, weight in _matrices(layer):
            hessian_KK = hessians[field] = weight.new_zeros(weight.shape[1], weight.shape[1])
            for run in runs:
                _, tokens_TK = next(run)
                hessian_KK.addmm_(tokens_TK.T, tokens_TK)
            found = round_to_nearest(weight, grid)
            nearest[field] = output_error(weight, found.dense(), hessian_KK)
            if method != "awq":  # at once: what follows meets what is lost here
                if method == "gptq":
                    found = gptq(weight, hessian_KK, grid, desc_act=desc_act)
                yield _put(decoder, index, field, found, hessian_KK, nearest[field])
        x = [next(run)[1] for run in runs]
        if method == "awq":
            _scale_inputs(decoder, layer, hessians, grid)
            for field, weight in _matrices(layer):
                found = round_to_nearest(weight, grid)
                yield _put(decoder, index, field, found, hessians[field], nearest[field])


def _parts(sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Of about `_PART_TOKENS` tokens each."""
    parts: list[list[np.ndarray]] = [[]]
    for sequence in sequences:
        if sum(map(len, parts[-1])) >= _PART_TOKENS:
            parts.append([])
        parts[-1].append(np.asarray(sequence))
    return parts


def _put(
    decoder: Decoder, index: int, field: str, found: Quantized, hessian_KK: torch.Tensor, nearest_error: float
) -> QuantizedMatrix:
    """What `found` stands for, in place of a matrix."""
    weight, dense = getattr(decoder.layers[index], field), found.dense()
    report = MatrixReport(f"model.layers.{index}.{field}", nearest_error, output_error(weight, dense, hessian_KK))
    weight.copy_(dense)
    return QuantizedMatrix(report, dict(_split(decoder, index, field, found)))


class _EveryLayer(KVPools):
    """Keys and values of one layer and part, which the next may overwrite: they are read where they are written."""

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
