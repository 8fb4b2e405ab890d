"""What the driver and an inference worker say to each other about generating.

A request asks for samples of one prompt; each sample comes back by itself as soon as it is finished. Arrays are
numpy, so that no torch tensor ever reaches the driver.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from olmorl.contract.peaks import DevicePeak
from olmorl.contract.weights import TensorSpec

FinishReason = Literal["stop", "length", "abort"]
Kernels = Literal["auto", "torch", "triton"]
Quantization = Literal["int8", "int4"]
KvCacheDtype = Literal["auto", "int8"]
Speculative = Literal["suffix", "model"]
VersionSpan = tuple[int, int, int]  # policy version, first token, one past the last
OBSERVED = -1  # in place of a version: tokens that an environment wrote
_LARGEST = float(np.finfo(np.float32).max)
KvEvent = tuple[int, int, Literal["prefill", "swap", "recompute"]]  # position, policy version, what happened


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop; the order of the rules is in docs/numerics.md.

    Raises ValueError, naming field, value and range, for anything out of range.
    """

    n: int = 1
    """samples of the prompt; they share one prefill"""
    temperature: float = 1.0
    """0 (or less than 1e-5) is greedy"""
    top_k: int = 0
    """keep the k likeliest tokens; 0 or -1 is off"""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """over prompt and output"""
    frequency_penalty: float = 0.0
    """over output alone"""
    presence_penalty: float = 0.0
    """over output alone"""
    max_tokens: int = 16
    min_tokens: int = 0
    """holds back EOS, stop ids and stop strings"""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int = 0
    """also return this many likeliest tokens at each position"""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """what those are likeliest by: the distribution drawn from, or the softmax of the untouched logits"""
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            given = getattr(self, name)
            self._check(name, given is None or isinstance(given, Iterable), "a list, or None for nothing")
            object.__setattr__(self, name, () if given is None else tuple(given))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name in ("n", "top_k", "max_tokens", "min_tokens", "logprobs"):
            self._check(name, _is_int(getattr(self, name)), "an integer of 64 bits")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            self._check(name, _is_finite(getattr(self, name)), "a finite float32")
        for name in ("ignore_eos", "prompt_logprobs"):
            self._check(name, isinstance(getattr(self, name), (bool, np.bool_)), "True or False")
        self._check("n", self.n >= 1, ">= 1")
        self._check("temperature", self.temperature >= 0, ">= 0")
        self._check("top_k", self.top_k >= 0, ">= 0, or -1 for off")
        self._check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._check("repetition_penalty", self.repetition_penalty > 0, "> 0")
        self._check("max_tokens", self.max_tokens >= 1, ">= 1")
        self._check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"in [0, max_tokens={self.max_tokens}]")
        self._check("logprobs", self.logprobs >= 0, ">= 0")
        self._check("seed", self.seed is None or _is_int(self.seed), "an integer of 64 bits or None")
        self._check("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        self._check("logprobs_mode", self.logprobs_mode in ("processed", "raw"), "'processed' or 'raw'")
        ids = self.stop_token_ids
        self._check("stop_token_ids", all(_is_int(i) and i >= 0 for i in ids), "integers >= 0")

    def _check(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ValueError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def truncates(self) -> bool:
        """True when the learner cannot reproduce the distribution from temperature alone."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1)
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or any(penalties) or self.min_tokens > 0


def _is_int(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return -(1 << 63) <= int(value) < 1 << 63


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    return bool(-_LARGEST <= value <= _LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Ask one worker for some samples of one prompt."""

    request_id: str
    lease: int
    """a result under an old lease (a worker that was given up and woke again) is dropped by the driver"""
    prompt_token_ids: np.ndarray  # [P] int32
    params: SamplingParams
    sample_indices: tuple[int, ...]
    """which of the params.n samples; after a fault only the missing ones are asked for again"""
    priority: int = 0
    """lower is served first; evaluation uses -1"""
    lengths: tuple[int, ...] | None = None
    """tokens at which each of `sample_indices` ends, as a load that is measured asks for; None: `params.max_tokens`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
    """One finished sample, as it leaves an inference worker. T tokens were generated."""

    request_id: str
    lease: int
    sample_index: int
    worker: str
    token_ids: np.ndarray  # [T] int32, the EOS or stop id included
    logprobs: np.ndarray  # [T] float32, of the distribution each token was drawn from
    raw_logprobs: np.ndarray  # [T] float32, log-softmax of the untouched logits
    version_spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: FinishReason
    kv_events: tuple[KvEvent, ...] = ()
    error: str | None = None
    t_first_token: float = 0.0  # seconds since the epoch
    t_finished: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReply:
    """What a worker hands over at one long poll: finished samples, and its counters since it started."""

    samples: tuple[RolloutSample, ...]
    stats: dict[str, float]
    queued: int
    """samples this worker holds, running and waiting"""


def dtype_for(device: str) -> str:
    """What the dtype "auto" stands for."""
    return "bfloat16" if device == "cuda" else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from; the keywords of `inference.LLM`."""

    model: str
    dtype: str = "float32"
    """"auto": float32 on a CPU, bfloat16 on CUDA"""
    device: str = "cpu"
    max_num_seqs: int = 64
    kv_cache_tokens: int | None = 65536
    """None: as many as a GPU has room for beside the model and its largest step"""
    gpu_memory_utilization: float = 0.9
    """of the GPU, or of its `gpu_share`, what an engine with `kv_cache_tokens = None` may fill"""
    block_size: int = 16
    max_tokens_per_step: int = 2048
    max_model_len: int | None = None
    prefix_caching: bool = True
    batching: Literal["continuous", "static"] = "continuous"
    quantization: Quantization | None = None
    """the layers' matrices, times tokens of 16 bits with a scale each: "int8" with a scale for each output, "int4" with
    scale and minimum for 32 inputs of each; quantised at load and at every update. Norms, embedding and head stay in
    `dtype`"""
    quantize_head: bool = False
    """the head in the precision of `quantization` too"""
    kv_cache_dtype: KvCacheDtype = "auto"
    """"auto": `dtype`; "int8": with a scale for each token and head, for kernels on a CPU and in torch"""
    speculative: Speculative | None = None
    """guess the next tokens and judge several in one step; tokens and logprobs stay what they are. "suffix": from what
    the sample and others of its prompt have said; "model": by `draft_model`"""
    draft_model: str | None = None
    """Hugging Face folder or hub id of a smaller model with the same vocabulary"""
    speculative_tokens: int = 7
    """guessed at once for one sample, at most"""
    speculative_step_tokens: int = 16
    """guesses are made while a step has fewer tokens than that, and fill it up: with so many samples running, none.
    0: measured at the start, up to where a step costs a third more than one of a single token"""
    kernels: Kernels = "auto"
    """"auto": compiled ones on a CPU in float32, Triton's on CUDA; "torch" keeps to the definitions in torch; "triton"
    needs CUDA or, to try the kernels on a CPU, TRITON_INTERPRET=1 before the start"""
    deterministic: bool = False
    """bitwise the same tokens and logprobs for a request in any batch; free where kernels are compiled (float32
    on a CPU), refused elsewhere"""
    overlap: bool | None = None
    """launch a step before the tokens of the last one are read; None: on a GPU. Outputs are the same"""
    cuda_graphs: bool | None = None
    """replay decode steps; None: on a GPU. True on a CPU keeps to the static buffers and replays by calling"""
    tensor_parallel_size: int = 1
    """processes, each with a device of this machine, that the model is divided among"""
    seed: int = 0
    threads: int | None = None
    """torch threads of the process; None leaves torch's own choice"""
    gpu_share: float = 1.0
    """of the device's memory that this process may take"""
    schedule_dir: str | None = None
    """where the engine records its schedule, see `inference.recorded_engine`; None records none"""

    def __post_init__(self) -> None:
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", dtype_for(self.device))

    @property
    def max_draft(self) -> int:
        return 0 if self.speculative is None else self.speculative_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says about itself once it stands."""

    name: str
    host: str
    pid: int
    device: str
    num_parameters: int
    peak_flops: float  # FLOP/s of one device
    peak_bandwidth: float  # bytes/s of one device
    peak_source: str
    tensors: tuple[TensorSpec, ...]
    """what a weight update must carry: Hugging Face names, shapes, the dtype on the wire"""
    devices: int = 1
    """of an inference worker: over how many its model is divided"""
    max_prompt_tokens: int | None = None
    """of an inference worker: the longest prompt it can take"""
    attention_tokens: float = float("inf")
    """of a learner: the length at which attention costs a sample as many FLOPs as the weights do"""

    @property
    def peak(self) -> str:
        """Of one device, and who says so: what its MFU and MBU are shares of."""
        return str(DevicePeak(self.peak_flops, self.peak_bandwidth, self.peak_source))
