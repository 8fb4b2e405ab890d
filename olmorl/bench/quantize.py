"""`olmorl quantize`: a checkpoint in few bits, calibrated on what the model itself writes, and what the bits cost.

Prompts are continued by the model, for those are the tokens a rollout will meet. Three quarters of them calibrate;
perplexity is that of the rest, against the model as it was.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import Quantization, SamplingParams
from olmorl.data.tokenizer import PromptEncoder, load_tokenizer
from olmorl.metrics.duration import duration
from olmorl.rollouts.prompt_reader import PromptReader

if TYPE_CHECKING:
    from inference.llm import LLM
    from inference.quantization.calibrate import MatrixReport
    from inference.quantization.grid import Grid, Quantized

HELD_OUT = 4  # every fourth sequence
_SPEED_TOKENS, _SPEED_SAMPLES = 64, 16
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeJob:
    model: str
    prompts: SourceSection
    out: Path
    method: Literal["gptq", "awq"]
    bits: int
    group_size: int | None
    """None: 128, or what there is of it that divides the matrices"""
    desc_act: bool
    max_prompt_tokens: int
    max_tokens: int
    """sampled behind each prompt; 0: prompts alone"""
    widths: tuple[int, ...]
    """of the comparison; none: the checkpoint alone"""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """A row of the comparison."""

    bits: int
    method: str
    size_bytes: int
    """of all weights, matrices in `bits`"""
    error: float
    """of a matrix's output, relative, the mean over matrices"""
    perplexity: float
    tokens_per_second: float
    computed_as: str
    """how the engine computed for that: it has products for int8 and int4 weights, else they are dense"""


def quantize(job: QuantizeJob, say: Say) -> dict[str, Any]:
    """Writes the checkpoint; layers, widths and perplexities for the report."""
    from inference.llm import LLM
    from inference.model.architecture import read_architecture
    from inference.model.load import resolve_folder
    from inference.quantization.calibrate import PROJECTIONS, quantize_layers
    from inference.quantization.checkpoint import (
        check_shapes,
        largest_group,
        packing_of,
        stored_dtype,
        write_checkpoint,
    )
    from inference.quantization.grid import Grid

    folder = resolve_folder(job.model)
    arch = read_architecture(folder)
    group_size = job.group_size or largest_group(arch)
    grid = Grid(job.bits, group_size, symmetric=job.method == "gptq")
    packing = packing_of(job.method, grid)
    check_shapes(arch, packing)
    if job.out.exists() and (job.out.is_file() or any(job.out.iterdir())):
        raise ConfigError(f"{job.out} is no empty folder; give another --out")
    llm = LLM(job.model)
    calibration, held_out = _sequences(job, llm, say)
    say(
        f"{sum(map(len, calibration)):,} tokens to calibrate, {sum(map(len, held_out)):,} held out; groups of "
        f"{group_size} inputs"
    )
    perplexity = _perplexity(llm, held_out)
    decoder = _fresh(llm)
    modules: dict[str, Quantized] = {}
    reports: list[MatrixReport] = []
    started, count = time.monotonic(), len(PROJECTIONS) * len(decoder.layers)
    for matrix in quantize_layers(decoder, calibration, method=job.method, grid=grid, desc_act=job.desc_act):
        modules |= matrix.modules
        reports.append(matrix.report)
        left = (time.monotonic() - started) / len(reports) * (count - len(reports))
        error, nearest = matrix.report.error, matrix.report.nearest_error
        say(f"{matrix.report.name}: {error:.4f}, to nearest {nearest:.4f} · {duration(left)} left")
    size = write_checkpoint(job.out, folder, decoder, modules, packing, desc_act=job.desc_act)
    found = _perplexity(LLM(job.out), held_out)
    grids = [Grid(bits, group_size, symmetric=True) for bits in job.widths]
    widths = [row for grid in grids for row in _compare(job, llm, calibration, held_out, grid, say)]
    return {
        "model": job.model,
        "checkpoint": str(job.out),
        "bytes": size,
        "dense_bytes": llm.engine.decoder.num_parameters * stored_dtype(folder).itemsize,
        "perplexity": found,
        "dense_perplexity": perplexity,
        "matrices": [asdict(report) for report in reports],
        "widths": [asdict(row) for row in widths],
    }


def _sequences(job: QuantizeJob, llm: "LLM", say: Say) -> tuple[list[np.ndarray], list[np.ndarray]]:
    encoder = PromptEncoder(load_tokenizer(job.model))
    reader = PromptReader(
        job.prompts, encoder=encoder, max_prompt_tokens=job.max_prompt_tokens, verifiers=None, scored=False
    )
    prompts = [list(map(int, prompt.token_ids)) for prompt in reader]
    if job.max_tokens:
        say(f"{len(prompts):,} prompts; up to {job.max_tokens:,} tokens are sampled behind each")
        outputs = llm.generate(prompts, SamplingParams(max_tokens=job.max_tokens, seed=job.seed))
        prompts = [out.prompt_token_ids + out.samples[0].token_ids for out in outputs]
    whole = [np.array(ids, np.int64) for ids in prompts if len(ids) > 1]
    if len(whole) < HELD_OUT:
        raise ConfigError(
            f"{job.prompts.path} gives {len(whole)} sequences of two tokens or more ({reader.num_too_long} prompts are "
            f"longer than {job.max_prompt_tokens} tokens); {HELD_OUT} are the least, some hundred suit"
        )
    return [ids for i, ids in enumerate(whole) if i % HELD_OUT], whole[::HELD_OUT]


def _perplexity(llm: "LLM", sequences: Sequence[np.ndarray]) -> float:
    return float(np.exp(-np.concatenate(llm.score(list(sequences))).mean()))


def _fresh(llm: "LLM") -> Any:
    """The model once more, in float32 and computed by torch, to be quantised in place."""
    from inference.model.load import load_decoder

    config = llm.engine.config
    return load_decoder(llm.engine.folder, dtype="float32", device=config.device, max_model_len=None, kernels="torch")


def _compare(
    job: QuantizeJob, llm: "LLM", calibration: list[np.ndarray], held_out: list[np.ndarray], grid: "Grid", say: Say
) -> list[Width]:
    """Rounded to nearest and by both methods, at the width of `grid`. `llm` serves for scoring: its weights are
    replaced."""
    from inference.quantization.calibrate import Method, quantize_layers
    from inference.quantization.checkpoint import stored_dtype

    rows = []
    quantization: Quantization | None = {8: "int8", 4: "int4"}.get(grid.bits)  # type: ignore[assignment]
    methods: tuple[Method, ...] = ("nearest", "gptq", "awq")
    for method in methods:
        decoder = _fresh(llm)
        own = replace(grid, symmetric=method == "gptq")
        reports: list[MatrixReport] = [
            matrix.report
            for matrix in quantize_layers(decoder, calibration, method=method, grid=own, desc_act=job.desc_act)
        ]
        llm.update_weights(decoder.tensors.items(), version=llm.engine.version + 1)
        row = Width(
            bits=grid.bits,
            method=method,
            size_bytes=_size(decoder, grid, stored_dtype(llm.engine.folder).itemsize),
            error=float(np.mean([report.error for report in reports])),
            perplexity=_perplexity(llm, held_out),
            tokens_per_second=_speed(job.model, quantization),
            computed_as=quantization or "dense float32",
        )
        say(f"{row.bits} bits, {method}: perplexity {row.perplexity:.3f}, error {row.error:.4f}")
        rows.append(row)
    return rows


def _size(decoder: Any, grid: "Grid", dense_bytes: int) -> int:
    """Numbers in `bits`, a float16 scale and a zero in `bits` for each group; of the rest `dense_bytes` a number."""
    total = 0
    for name, tensor in decoder.tensors.items():
        if name.endswith("_proj.weight"):
            groups = tensor.numel() // grid.group_size
            total += (tensor.numel() * grid.bits + groups * (16 + grid.bits)) // 8
        else:
            total += tensor.numel() * dense_bytes
    return total


@cache
def _speed(model: str, quantization: "Quantization | None") -> float:
    """Tokens a second of `_SPEED_SAMPLES` samples of one prompt, behind a warm-up."""
    from inference.llm import LLM

    llm = LLM(model, quantization=quantization, max_num_seqs=_SPEED_SAMPLES, kv_cache_tokens=4096)
    params = SamplingParams(n=_SPEED_SAMPLES, max_tokens=_SPEED_TOKENS, ignore_eos=True, seed=0)
    llm.generate([[1, 2, 3]], params)
    started = time.perf_counter()
    llm.generate([[3, 2, 1]], params)
    return _SPEED_SAMPLES * _SPEED_TOKENS / (time.perf_counter() - started)
