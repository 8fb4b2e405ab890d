"""What each Triton kernel becomes on each GPU, without one: `make kernels-report`.

Compiles every launch that the shapes below make, exactly as the engine specialises them, and reads registers, spills
and shared memory off the machine code. Bytes are what one call must move at least, for `BATCH` sequences of `CONTEXT`
tokens (prefill: one chunk of `CHUNK` tokens behind them).
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from inference.kernels.gpu_attention import AttentionStep, Tiles, attention_launches, attention_shape
from inference.kernels.gpu_heads import heads_launch
from inference.kernels.gpu_launch import Launch
from inference.kernels.gpu_norm import ADD_AFTER, ADD_BEFORE, PLAIN, norm_launch, silu_launch
from inference.kernels.gpu_quantized import int4_launches, int8_launches
from inference.kernels.gpu_sampler import CHUNK as VOCABULARY_CHUNK
from inference.kernels.gpu_sampler import Draw, draw_launches, process_launch
from inference.kernels.gpu_truncation import truncation_launch
from inference.quantization.formats import FORMATS

BATCH, CONTEXT, CHUNK = 64, 4096, 2048
SPLITS = 8  # where it is split
TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 90, 100)}
OTHER_TARGETS = {"gfx942": GPUTarget("hip", "gfx942", 64)}
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """One model as the kernels see it."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    qk_norm: str | None = None
    window: int | None = None
    post_norm: bool = False
    dtype: torch.dtype = torch.bfloat16


SHAPES = (
    Shape("SmolLM2-135M", 9, 3, 64, 576, 1536, 49152),
    Shape("Llama-3.1-8B", 32, 8, 128, 4096, 14336, 128256),
    Shape("Qwen2.5-0.5B", 14, 2, 64, 896, 4864, 151936),
    Shape("Qwen3-8B", 32, 8, 128, 4096, 12288, 151936, qk_norm="head"),
    Shape("OLMo-2-1B", 16, 16, 128, 2048, 8192, 100352, qk_norm="whole", post_norm=True),
    Shape("OLMo-3-7B", 32, 32, 128, 4096, 11008, 100278, qk_norm="whole", window=4096, post_norm=True),
    Shape("96 a head", 32, 8, 96, 3072, 8192, 32064),
    Shape("Llama-3.1-8B fp16", 32, 8, 128, 4096, 14336, 128256, dtype=torch.float16),
    Shape("SmolLM2-135M fp32", 9, 3, 64, 576, 1536, 49152, dtype=torch.float32),
    Shape("OLMo-3-7B fp32", 32, 32, 128, 4096, 11008, 100278, "whole", 4096, True, torch.float32),
)


@dataclass(frozen=True, slots=True)
class Configuration:
    kernel: str
    launch: Launch
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Resources:
    registers: int
    spill_bytes: int
    shared_bytes: int


def configurations(shape: Shape) -> Iterator[Configuration]:
    """Every launch of a step of one model, on tensors without memory."""
    yield from _attention(shape)
    yield from _rows(shape)
    yield from _quantized(shape)
    if shape.dtype != torch.float16:  # logits are float32 whatever the model is
        yield from _sampling(shape.vocabulary)


def resources(launch: Launch, target: GPUTarget) -> Resources:
    """Spills are what the machine code keeps on a stack: no kernel here has another use for one."""
    compiled = launch.compile(target)
    binary = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [_tool("cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of resources: {usage!r}")
    registers, stack, local = map(int, found.groups())
    return Resources(registers, stack + local, compiled.metadata.shared)


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pool(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (
        _meta(1024, shape.kv_heads, _BLOCK_SIZE, shape.head_dim, dtype=shape.dtype) for _ in ("keys", "values")
    )
    return keys.transpose(2, 3), values


def _attention(shape: Shape) -> Iterator[Configuration]:
    group, element = shape.heads // shape.kv_heads, shape.dtype.itemsize
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for phase, tokens, contexts, splits in (
        ("decode", BATCH, BATCH, 1),
        ("decode split", BATCH, BATCH, SPLITS),
        ("prefill", CHUNK, 1, 1),
        ("prefill split", CHUNK, 1, SPLITS),
    ):
        cut = attention_shape(
            group=group, head_dim=shape.head_dim, dtype=shape.dtype, decode=phase.startswith("decode")
        )
        per_tile = 1 if phase.startswith("decode") else cut.block_m // group
        part = Tiles(_meta(-(-tokens // per_tile), 3), per_tile, cut)
        step = AttentionStep(_meta(tokens, dtype=torch.int64), _meta(contexts, 512), (part,))
        out = _meta(tokens, shape.heads * shape.head_dim, dtype=shape.dtype)
        for window in {None, shape.window}:
            seen = min(CONTEXT, window or CONTEXT)
            num_bytes = 2 * contexts * seen * shape.kv_heads * shape.head_dim * element + 2 * out.numel() * element
            launches = attention_launches(
                _meta(tokens, width, dtype=shape.dtype), *_pool(shape), step, part, out,
                num_heads=shape.heads, window=window, splits=splits,
            )  # fmt: skip
            parts = SPLITS * tokens * shape.heads * (shape.head_dim + 2) * 4 + out.numel() * element
            label = phase if window is None else f"{phase}, window {window}"
            for launch, kernel, size in zip(launches, ("attend", "merge"), (num_bytes, parts), strict=False):
                yield Configuration(f"{kernel} ({label})", launch, size)


def _rows(shape: Shape) -> Iterator[Configuration]:
    element, tokens = shape.dtype.itemsize, BATCH
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    q_norm = k_norm = None
    if shape.qk_norm is not None:
        counts = (shape.heads, shape.kv_heads) if shape.qk_norm == "whole" else (1, 1)
        q_norm, k_norm = (_meta(count * shape.head_dim, dtype=shape.dtype) for count in counts)
    tokens_T = _meta(tokens, dtype=torch.int64)
    rope = _meta(2, 8192, shape.head_dim // 2, dtype=torch.float32)
    heads = heads_launch(
        _meta(tokens, width, dtype=shape.dtype), q_norm, k_norm, rope, tokens_T, tokens_T, *_pool(shape),
        num_heads=shape.heads, qk_norm=shape.qk_norm, eps=1e-5,
    )  # fmt: skip
    yield Configuration("norm_rope_store", heads, 2 * tokens * width * element)
    x = _meta(tokens, shape.hidden, dtype=shape.dtype)
    weight = _meta(shape.hidden, dtype=shape.dtype)
    for mode, passes in ((PLAIN, 2), (ADD_AFTER if shape.post_norm else ADD_BEFORE, 3 if shape.post_norm else 4)):
        name = {PLAIN: "rms_norm", ADD_BEFORE: "add_rms_norm", ADD_AFTER: "rms_norm_add"}[mode]
        yield Configuration(name, norm_launch(x, x, weight, x, 1e-5, mode), passes * x.numel() * element)
    gate_up = _meta(tokens, 2 * shape.intermediate, dtype=shape.dtype)
    out = _meta(tokens, shape.intermediate, dtype=shape.dtype)
    yield Configuration("gated_silu", silu_launch(gate_up, out), 3 * out.numel() * element)


def _quantized(shape: Shape) -> Iterator[Configuration]:
    """The widest matrix, for each shape of blocks; what is moved is mostly the weights."""
    outputs, element = 2 * shape.intermediate, shape.dtype.itemsize
    for tokens in (1, BATCH, CHUNK):
        x = _meta(tokens, shape.hidden, dtype=shape.dtype)
        out = _meta(tokens, outputs, dtype=shape.dtype)
        moved = (x.numel() + out.numel()) * element
        for name, form in FORMATS.items():
            rows = _meta(outputs, form.row_bytes(shape.hidden), dtype=form.dtype)
            *before, product = (int8_launches if name == "int8" else int4_launches)(x, rows, None, out)
            yield Configuration(f"{name} product ({tokens} tokens)", product, rows.numel() + moved)
            if tokens == BATCH:
                for launch in before:
                    yield Configuration("digits of tokens", launch, x.numel() * (element + 2))


def _sampling(vocabulary: int) -> Iterator[Configuration]:
    logits = _meta(BATCH, vocabulary, dtype=torch.float32)
    x = _meta(BATCH, -(-vocabulary // 16) * 16, dtype=torch.float32)
    floats, integers = _meta(BATCH, dtype=torch.float32), _meta(BATCH)
    draw = Draw(_meta(BATCH, dtype=torch.int64), _meta(BATCH, 4, dtype=torch.float32))
    row_bytes = 4 * logits.numel()
    counts, limits = (integers, _meta(BATCH, vocabulary)), (floats, integers)
    words = _meta(BATCH, 2)
    plain = draw_launches(logits, None, floats, integers, words, None, None, draw)
    ruled = draw_launches(logits, x, floats, integers, words, limits, counts, draw)
    yield Configuration("draw", plain[0], row_bytes)
    yield Configuration("draw (all rules)", ruled[0], 2 * row_bytes)
    yield Configuration("merge of chunks", plain[1], 32 * vocabulary * BATCH // VOCABULARY_CHUNK)
    yield Configuration("merge of chunks (counted)", ruled[1], 32 * vocabulary * BATCH // VOCABULARY_CHUNK)
    process = process_launch(
        logits, floats, _meta(BATCH, 3, dtype=torch.float32), integers, counts[1], _meta(BATCH, 3), x, 1 << 30
    )
    yield Configuration("process", process, 3 * row_bytes)
    yield Configuration("truncate", truncation_launch(x, integers, floats, floats, floats, integers), row_bytes)


def main() -> int:
    spilled = 0
    print(
        f"{'model':19}{'kernel':34}{'target':8}{'warps':>6}{'stages':>7}{'registers':>10}{'spills':>7}{'shared':>8}{'bytes':>14}"
    )
    for shape in SHAPES:
        for configuration in configurations(shape):
            options = configuration.launch.options
            for name, target in TARGETS.items():
                found = resources(configuration.launch, target)
                spilled += found.spill_bytes > 0
                print(
                    f"{shape.name:19}{configuration.kernel:34}{name:8}{options['num_warps']:6}{options['num_stages']:7}"
                    f"{found.registers:10}{found.spill_bytes:7}{found.shared_bytes:8}{configuration.num_bytes:14,}",
                    flush=True,
                )
            for name, target in OTHER_TARGETS.items():
                shared = configuration.launch.compile(target).metadata.shared
                print(f"{shape.name:19}{configuration.kernel:34}{name:8} compiles, shared {shared}", flush=True)
    print(f"{spilled} configurations spill")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
