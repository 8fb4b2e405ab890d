"""A whole step of the decoder as one compiled function that a team of threads enters together.

Twin: `inference.model.decoder.Decoder.forward` in torch. Token arrays are [panel, feature, lane]; weights are
addresses, read where the checkpoint's tensors lie, so an update in place needs nothing here.

Suffixes: T tokens, M hidden size, H all heads, D head size, L layers, P panels, R rows of the block table, W its width.
"""

from typing import NamedTuple

import numpy as np

from inference.kernels.compiling import exact
from inference.kernels.cpu_attention import attend, norm_rope_store
from inference.kernels.cpu_linear import gated_linear, linear, share_start
from inference.kernels.cpu_math import address, floats
from inference.kernels.cpu_quantized_rows import quantize_panels, row_words
from inference.kernels.cpu_team import meet, take
from inference.kernels.cpu_tile import LANES

PIECES_PER_LAYER = 5  # shared by counting, with a counter for each thread: four products and attention
_GROUP = 4  # tokens whose queries, keys and values are unpacked together
_HALF = 8  # tokens normed together
PART = 32  # features whose squares are summed in one
U = np.uint64


class Shape(NamedTuple):
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_step: int
    """bytes from a block of the pool to the next"""
    int8_kv: int
    """1: keys and values are as in `inference.model.kv_int8`; 0: floats"""
    num_positions: int
    pre_norm: int
    norm_heads: int
    """0: queries and keys have no norm; 1: each head by itself; 2: the whole projection"""
    bits: int
    """8 or 4: the four matrices of a layer are quantised rows, `inference.kernels.cpu_quantized_rows`; 0: floats"""


class LayerFields(NamedTuple):
    """Columns of the table of layers, int64: addresses (0 is none), and the window (0 is none)."""

    attention_norm: int = 0
    qkv: int = 1
    qkv_bias: int = 2
    q_norm: int = 3
    k_norm: int = 4
    rope: int = 5
    window: int = 6
    out: int = 7
    out_bias: int = 8
    mlp_norm: int = 9
    gate_up: int = 10
    gate_up_bias: int = 11
    down: int = 12
    down_bias: int = 13


class Step(NamedTuple):
    token_ids_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64
    rows_T: np.ndarray  # int64
    slots_T: np.ndarray  # int64
    table_RW: np.ndarray  # int32
    window_slots_T: np.ndarray
    window_table_RW: np.ndarray


class Scratch(NamedTuple):
    x: np.ndarray  # [P, M, lane], the residual stream
    normed: np.ndarray  # [P, M, lane]
    y: np.ndarray  # [P, M, lane], what attention or MLP adds
    wide: np.ndarray  # [P, 2 * intermediate or all heads, lane]
    attended: np.ndarray  # [P, query heads, lane]
    qkv_THD: np.ndarray
    scores: np.ndarray  # [thread, query heads, keys of a tile]
    keys: np.ndarray  # [thread, D, lane]
    block: np.ndarray  # [thread, D * block size], keys or values of a head
    out: np.ndarray  # [thread, query heads, D]
    quantized: np.ndarray  # [P, 2, features / 4, lane] int32, what a product with quantised rows reads
    token_scales: np.ndarray  # [P, lane]
    token_sums: np.ndarray  # [P, group, lane]
    squares: np.ndarray  # [P, part of the hidden features, lane], their sums


FIELDS = LayerFields()


@exact
def forward(  # type: ignore[no-untyped-def]
    thread, threads, signals, shape, eps, layers_L, caches_L2, embedding, final_norm, step, scratch, hidden_TM
):
    tokens = len(step.token_ids_T)
    x, y = address(scratch.x), address(scratch.y)
    wide, attended = address(scratch.wide), address(scratch.attended)
    model, inner, width = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    qkv_width = width + 2 * shape.num_kv_heads * shape.head_dim
    panel, wide_panel = model * LANES, scratch.wide.shape[1] * LANES
    source = address(scratch.normed) if shape.pre_norm else x
    _embed(thread, threads, step.token_ids_T, embedding, scratch.x)
    met, piece, norm = np.int64(0), np.int64(0), np.int64(0)
    for index in range(len(layers_L)):
        layer = layers_L[index]
        if shape.pre_norm:
            norm = layer[FIELDS.attention_norm]
        if shape.pre_norm or index > 0:
            met = _residual_norm(thread, threads, signals, met, tokens, scratch, norm, eps, shape.pre_norm, index > 0)
        met = meet(signals, threads, met)
        met = _linear(
            thread, threads, signals, met, piece, shape, scratch, layer[FIELDS.qkv], layer[FIELDS.qkv_bias],
            qkv_width, model, source, panel, wide, wide_panel, tokens,
            _own_rows(thread, threads, shape.bits, layer[FIELDS.out], model, width),
        )  # fmt: skip
        _rope_store(thread, threads, shape, eps, layer, caches_L2[index], step, scratch)
        met = meet(signals, threads, met)
        _attention(
            thread, threads, signals, piece + threads, shape, layer[FIELDS.window], caches_L2[index], step, scratch
        )
        met = meet(signals, threads, met)
        met = _linear(
            thread, threads, signals, met, piece + 2 * threads, shape, scratch, layer[FIELDS.out],
            layer[FIELDS.out_bias], model, width, attended, width * LANES, y, panel, tokens,
            _own_rows(thread, threads, shape.bits, layer[FIELDS.gate_up], inner, model),
        )  # fmt: skip
        norm = layer[FIELDS.mlp_norm] if shape.pre_norm else layer[FIELDS.attention_norm]
        met = _residual_norm(thread, threads, signals, met, tokens, scratch, norm, eps, shape.pre_norm, True)
        met = meet(signals, threads, met)
        met = _gated_linear(
            thread, threads, signals, met, piece + 3 * threads, shape, scratch, layer[FIELDS.gate_up],
            layer[FIELDS.gate_up_bias], source, panel, wide, wide_panel, tokens,
            _own_rows(thread, threads, shape.bits, layer[FIELDS.down], model, inner),
        )  # fmt: skip
        beyond = np.int64(0)
        if index + 1 < len(layers_L):
            beyond = _own_rows(thread, threads, shape.bits, layers_L[index + 1, FIELDS.qkv], qkv_width, model)
        met = _linear(
            thread, threads, signals, met, piece + 4 * threads, shape, scratch, layer[FIELDS.down],
            layer[FIELDS.down_bias], model, inner, wide, wide_panel, y, panel, tokens, beyond,
        )  # fmt: skip
        norm = layer[FIELDS.mlp_norm]
        piece += PIECES_PER_LAYER * threads
    if not shape.pre_norm:
        met = _residual_norm(thread, threads, signals, met, tokens, scratch, norm, eps, shape.pre_norm, True)
        met = meet(signals, threads, met)
    _residual_norm(thread, threads, signals, met, tokens, scratch, final_norm, eps, 1, shape.pre_norm == 1)
    _unpack(thread, threads, scratch.normed, hidden_TM)


@exact
def _own_rows(thread, threads, bits, weight, num_rows, num_features):  # type: ignore[no-untyped-def]
    """The address of the weights that a thread reads first."""
    return weight + 4 * share_start(num_rows, thread, threads) * row_words(bits, num_features)


@exact
def _linear(  # type: ignore[no-untyped-def]
    thread, threads, signals, met, piece, shape, scratch, weight, bias, num_rows, num_features, x, x_panel, out,
    out_panel, tokens, beyond,
):  # fmt: skip
    """Begins and ends where all have met; how often they met is returned. `beyond`: as in `linear`."""
    lanes = np.int64(LANES)  # as a literal it would have every callee compiled once more
    quantized, scales, sums = address(scratch.quantized), address(scratch.token_scales), address(scratch.token_sums)
    x, met = _as_multiplied(
        thread, threads, signals, met, shape.bits, num_features, x, x_panel, quantized, scales, sums, tokens
    )
    linear(
        thread, threads, signals, piece, shape.bits, weight, bias, num_rows, num_features, x, x_panel, scales, sums,
        out, lanes, out_panel, tokens, beyond,
    )  # fmt: skip
    return meet(signals, threads, met)


@exact
def _gated_linear(  # type: ignore[no-untyped-def]
    thread, threads, signals, met, piece, shape, scratch, weight, bias, x, x_panel, out, out_panel, tokens, beyond
):
    """As `_linear`."""
    size, model = shape.intermediate_size, shape.hidden_size
    quantized, scales, sums = address(scratch.quantized), address(scratch.token_scales), address(scratch.token_sums)
    x, met = _as_multiplied(
        thread, threads, signals, met, shape.bits, model, x, x_panel, quantized, scales, sums, tokens
    )
    gated_linear(
        thread, threads, signals, piece, shape.bits, weight, bias, size, model, x, x_panel, scales, sums, out,
        out_panel, tokens, beyond,
    )  # fmt: skip
    return meet(signals, threads, met)


@exact
def _as_multiplied(  # type: ignore[no-untyped-def]
    thread, threads, signals, met, bits, num_features, x, x_panel, quantized, scales, sums, tokens
):
    """Where the tokens lie as rows of `bits` take them, and how often all have met."""
    if bits == 0:
        return x, met
    quantize_panels(thread, threads, bits, x, x_panel, num_features, quantized, scales, sums, tokens)
    return quantized, meet(signals, threads, met)


@exact
def head(  # type: ignore[no-untyped-def]
    thread, threads, signals, hidden_RM, bits, weight, vocab_size, panels, quantized, token_scales, token_sums,
    logits_VR,
):  # fmt: skip
    """logits = weight hidden; `panels` and what follows it are scratch, and `logits_VR` has room for whole panels."""
    rows, model = hidden_RM.shape
    _pack(thread, threads, hidden_RM, panels)
    met = meet(signals, threads, np.int64(0))
    piece, none, x_panel = np.int64(0), np.int64(0), model * LANES
    scales, sums = address(token_scales), address(token_sums)
    x, _ = _as_multiplied(
        thread, threads, signals, met, bits, model, address(panels), x_panel, address(quantized), scales, sums, rows
    )
    linear(
        thread, threads, signals, piece, bits, weight, none, vocab_size, model, x, x_panel, scales, sums,
        address(logits_VR), logits_VR.shape[1], np.int64(LANES), rows, none,
    )  # fmt: skip


@exact
def _pack(thread, threads, hidden_RM, panels):  # type: ignore[no-untyped-def]
    rows, model = hidden_RM.shape
    for row in range(thread, rows, threads):
        for m in range(model):
            panels[row // LANES, m, row % LANES] = hidden_RM[row, m]


@exact
def _own_features(thread, threads, size):  # type: ignore[no-untyped-def]
    """[first, end) of those that a thread adds, norms and unpacks, in whole parts: what it has computed lies in its own
    cache, and what another has is slow to come."""
    parts = (size + PART - 1) // PART
    return min(size, thread * parts // threads * PART), min(size, (thread + 1) * parts // threads * PART)


@exact
def _embed(thread, threads, token_ids_T, embedding, x):  # type: ignore[no-untyped-def]
    """Empty lanes become 0: they are computed with the others, and numbers too small for the fast path are slow."""
    tokens, size = len(token_ids_T), x.shape[1]
    first, end = _own_features(thread, threads, size)
    for panel in range((tokens + LANES - 1) // LANES):
        for lane in range(LANES):
            t = panel * LANES + lane
            row = floats(embedding + 4 * token_ids_T[min(t, tokens - 1)] * size, size)
            keep = np.float32(1 if t < tokens else 0)
            for m in range(first, end):
                x[panel, m, lane] = row[m] * keep


@exact
def _residual_norm(thread, threads, signals, met, tokens, scratch, weight, eps, pre_norm, adds):  # type: ignore[no-untyped-def]
    """x += y, normed = norm(x) where the norm comes first; x += norm(y) where it comes last.

    Begins where all have met; they meet once more within, and how often they met is returned.
    """
    first, end = _own_features(thread, threads, scratch.x.shape[1])
    _add_squares(first, end, tokens, scratch, pre_norm, adds)
    met = meet(signals, threads, met)
    _norm(first, end, tokens, scratch, floats(weight, scratch.x.shape[1]), eps, pre_norm)
    return met


@exact
def _add_squares(first, end, tokens, scratch, pre_norm, adds):  # type: ignore[no-untyped-def]
    """Of features in parts: one long sum would lose digits."""
    for panel in range((tokens + LANES - 1) // LANES):
        x, y, normed = scratch.x[panel], scratch.y[panel], scratch.x[panel] if pre_norm else scratch.y[panel]
        for lane in range(0, min(LANES, tokens - panel * LANES), _HALF):
            for start in range(first, end, PART):
                part = scratch.squares[panel, start // PART]
                for j in range(_HALF):
                    part[lane + j] = 0
                for m in range(start, min(start + PART, end)):
                    if pre_norm and adds:
                        for j in range(_HALF):
                            x[m, lane + j] += y[m, lane + j]
                    for j in range(_HALF):
                        part[lane + j] += normed[m, lane + j] * normed[m, lane + j]


@exact
def _norm(first, end, tokens, scratch, weight, eps, pre_norm):  # type: ignore[no-untyped-def]
    size, scale = len(weight), np.empty(_HALF, np.float32)
    for panel in range((tokens + LANES - 1) // LANES):
        x, y, out, squares = scratch.x[panel], scratch.y[panel], scratch.normed[panel], scratch.squares[panel]
        for lane in range(0, min(LANES, tokens - panel * LANES), _HALF):
            scale[:] = 0
            for part in range((size + PART - 1) // PART):
                for j in range(_HALF):
                    scale[j] += squares[part, lane + j]
            for j in range(_HALF):
                scale[j] = np.float32(1) / np.sqrt(scale[j] / np.float32(size) + np.float32(eps))
            for m in range(first, end):
                for j in range(_HALF):
                    if pre_norm:
                        out[m, lane + j] = weight[m] * (x[m, lane + j] * scale[j])
                    else:
                        x[m, lane + j] += weight[m] * (y[m, lane + j] * scale[j])


@exact
def _unpack(thread, threads, normed, hidden_TM):  # type: ignore[no-untyped-def]
    tokens, size = hidden_TM.shape
    first, end = _own_features(thread, threads, size)
    for t in range(tokens):
        for m in range(first, end):
            hidden_TM[t, m] = normed[t // LANES, m, t % LANES]


@exact
def _rope_store(thread, threads, shape, eps, layer, cache_2, step, scratch):  # type: ignore[no-untyped-def]
    tokens, half = len(step.token_ids_T), shape.head_dim // 2
    qkv_TX = scratch.qkv_THD.reshape(len(scratch.qkv_THD), -1)
    slots_T = step.slots_T if layer[FIELDS.window] == 0 else step.window_slots_T
    for t in range(thread * _GROUP, tokens, threads * _GROUP):
        wide, lane = scratch.wide[t // LANES], t % LANES
        for f in range(qkv_TX.shape[1]):
            for j in range(_GROUP):
                qkv_TX[t + j, f] = wide[f, lane + j]
        for one in range(t, min(t + _GROUP, tokens)):
            cos = layer[FIELDS.rope] + 4 * step.positions_T[one] * half
            norm_rope_store(
                scratch.qkv_THD[one], shape.num_heads, shape.num_kv_heads, shape.norm_heads,
                layer[FIELDS.q_norm], layer[FIELDS.k_norm], eps,
                floats(cos, half), floats(cos + 4 * shape.num_positions * half, half),
                cache_2[0], cache_2[1], shape.block_step, shape.int8_kv, slots_T[one], shape.block_size,
            )  # fmt: skip


@exact
def _attention(thread, threads, signals, piece, shape, window, cache_2, step, scratch):  # type: ignore[no-untyped-def]
    num_kv, head_dim = shape.num_kv_heads, shape.head_dim
    tokens = len(step.token_ids_T)
    table_RW = step.table_RW if window == 0 else step.window_table_RW
    # All heads of a token together read a block in one go; few tokens are split, to have work for all threads.
    parts = num_kv if threads > 1 and tokens < 4 * threads else 1
    heads, kv_heads = shape.num_heads // parts, num_kv // parts
    out_HD = scratch.out[thread]
    item = take(signals, piece, 1)
    while item < tokens * parts:
        t, part = item // parts, item % parts
        item = take(signals, piece, 1)
        then, next_part = (item // parts, item % parts) if item < tokens * parts else (t, part)
        attend(
            scratch.qkv_THD[t, part * heads : (part + 1) * heads], part * kv_heads, kv_heads, cache_2[0], cache_2[1],
            shape.block_step, shape.int8_kv, shape.block_size, table_RW[step.rows_T[t]], step.positions_T[t], window,
            next_part * kv_heads, table_RW[step.rows_T[then]], step.positions_T[then],
            scratch.scores[thread], scratch.keys[thread], scratch.block[thread], out_HD,
        )  # fmt: skip
        attended, lane = scratch.attended[t // LANES], t % LANES
        for h in range(heads):
            for d in range(head_dim):
                attended[U((part * heads + h) * head_dim + d), U(lane)] = out_HD[h, U(d)]
