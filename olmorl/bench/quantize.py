"""`olmorl quantize`: a checkpoint in few bits, calibrated on what the model itself writes, and what the bits cost.

Prompts are continued by the model, for those are the tokens a rollout will meet. Three quarters of them calibrate;
perplexity is that of the rest, against the model as it was.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import SamplingParams
from olmorl.data.tokenizer import PromptEncoder, load_tokenizer
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
    group_size: int
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
    from inference.quantization.calibrate import quantize_layers
    from inference.quantization.checkpoint import check_shapes, packing_of, write_checkpoint
    from inference.quantization.grid import Grid

    grid = Grid(job.bits, job.group_size, symmetric=job.method == "gptq")
    packing = packing_of(job.method, grid)
    if job.out.exists() and any(job.out.iterdir()):
        raise ConfigError(f"{job.out} is not empty; give another --out")
    llm = LLM(job.model)
    check_shapes(llm.engine.decoder, packing)
    calibration, held_out = _sequences(job, llm)
    say(f"{sum(map(len, calibration)):,} tokens to calibrate, {sum(map(len, held_out)):,} held out")
    perplexity = _perplexity(llm, held_out)
    decoder, folder = _fresh(llm), llm.engine.folder
    modules: dict[str, Quantized] = {}
    reports: list[MatrixReport] = []
    for matrix in quantize_layers(decoder, calibration, method=job.method, grid=grid, desc_act=job.desc_act):
        modules |= matrix.modules
        reports.append(matrix.report)
        say(f"{matrix.report.name}: {matrix.report.error:.4f}, to nearest {matrix.report.nearest_error:.4f}")
    size = write_checkpoint(job.out, folder, decoder, modules, packing, desc_act=job.desc_act)
    found = _perplexity(LLM(job.out), held_out)
    widths = [row for bits in job.widths for row in _compare(job, llm, calibration, held_out, bits, say)]
    return {
        "model": job.model,
        "checkpoint": str(job.out),
        "bytes": size,
        "dense_bytes": sum(spec.num_bytes for spec in llm.engine.decoder.specs),
        "perplexity": found,
        "dense_perplexity": perplexity,
        "matrices": [asdict(report) for report in reports],
        "widths": [asdict(row) for row in widths],
    }


def _sequences(job: QuantizeJob, llm: "LLM") -> tuple[list[np.ndarray], list[np.ndarray]]:
    encoder = PromptEncoder(load_tokenizer(job.model))
    reader = PromptReader(
        job.prompts, encoder=encoder, max_prompt_tokens=job.max_prompt_tokens, verifiers=None, scored=False
    )
    prompts = [list(map(int, prompt.token_ids)) for prompt in reader]
    if job.max_tokens:
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
    job: QuantizeJob, llm: "LLM", calibration: list[np.ndarray], held_out: list[np.ndarray], bits: int, say: Say
) -> list[Width]:
    """Rounded to nearest and by both methods, at one width. `llm` serves for scoring: its weights are replaced."""
    from inference.quantization.calibrate import Method, quantize_layers
    from inference.quantization.grid import Grid

    rows = []
    speed, computed_as = _speed(job, bits)
    methods: tuple[Method, ...] = ("nearest", "gptq", "awq")
    for method in methods:
        grid = Grid(bits, job.group_size, symmetric=method == "gptq")
        decoder = _fresh(llm)
        reports: list[MatrixReport] = [
            matrix.report
            for matrix in quantize_layers(decoder, calibration, method=method, grid=grid, desc_act=job.desc_act)
        ]
        llm.update_weights(decoder.tensors.items(), version=llm.engine.version + 1)
        row = Width(
            bits=bits,
            method=method,
            size_bytes=_size(decoder, grid),
            error=float(np.mean([report.error for report in reports])),
            perplexity=_perplexity(llm, held_out),
            tokens_per_second=speed,
            computed_as=computed_as,
        )
        say(f"{bits} bits, {method}: perplexity {row.perplexity:.3f}, error {row.error:.4f}")
        rows.append(row)
    return rows


def _size(decoder: Any, grid: "Grid") -> int:
    """Numbers in `bits`, a float16 scale and a zero in `bits` for each group; the rest as it is."""
    total = 0
    for name, tensor in decoder.tensors.items():
        if name.endswith("_proj.weight"):
            groups = len(tensor) * -(-tensor.shape[1] // grid.group_size)
            total += (tensor.numel() * grid.bits + groups * (16 + grid.bits)) // 8
        else:
            total += tensor.nbytes
    return total


def _speed(job: QuantizeJob, bits: int) -> tuple[float, str]:
    """Tokens a second of `_SPEED_SAMPLES` samples of one prompt, behind a warm-up."""
    from inference.llm import LLM

    quantization = {8: "int8", 4: "int4"}.get(bits)
    llm = LLM(job.model, quantization=quantization, max_num_seqs=_SPEED_SAMPLES, kv_cache_tokens=4096)
    params = SamplingParams(n=_SPEED_SAMPLES, max_tokens=_SPEED_TOKENS, ignore_eos=True, seed=0)
    llm.generate([[1, 2, 3]], params)
    started = time.perf_counter()
    llm.generate([[3, 2, 1]], params)
    return _SPEED_SAMPLES * _SPEED_TOKENS / (time.perf_counter() - started), quantization or "dense float32"
