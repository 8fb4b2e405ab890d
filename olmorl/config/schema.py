"""Every knob of a run, in the sections of its TOML file. No torch here: a config is read on any machine.

A field's docstring is its help text. What a section needs beyond its own fields is checked in `Config` at the end.
"""

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


PROCEDURAL = "reasoning_gym:"


def _as_list(values: object, key: str) -> object:
    """A single text or table stands for a list of one."""
    if isinstance(values, dict) and isinstance(values.get(key), str | dict):
        return {**values, key: (values[key],)}
    return values


class Section(BaseModel):
    """Frozen, and refuses what it does not know. Strict: "16" or true is no number; paths and lists are converted."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, validate_default=True
    )


class RunSection(Section):
    name: str = "run"
    """the run directory is <output_dir>/<name>"""
    output_dir: Path = Field(Path("outputs"), strict=False)
    seed: int = 0
    steps: int = Field(100, ge=1)
    """optimizer steps in all"""

    @property
    def directory(self) -> Path:
        return self.output_dir / self.name


class ModelSection(Section):
    path: str = Field(min_length=1)
    """local Hugging Face folder or hub id"""
    dtype: Dtype = "auto"
    """auto: float32 on CPU, bfloat16 on CUDA"""


class SourceSection(Section):
    """One source of prompts. Of several, each epoch holds every prompt once, unless weights or counts say otherwise."""

    path: str = Field(min_length=1)
    """a .jsonl, .json or .parquet file (the first two also .gz), a folder of a Hugging Face data set, a hub id, or
    reasoning_gym:TASK"""
    name: str | None = None
    """in the metrics; None takes what the rows say, or the path"""
    split: str = "train"
    """of a Hugging Face data set"""
    subset: str | None = None
    """of a Hugging Face data set: its configuration"""
    streaming: bool = False
    """read a hub data set row by row, as far as `limit`, without downloading it whole"""
    limit: int | None = Field(None, ge=1)
    """read only so many rows; of reasoning_gym: make so many"""
    weight: float | None = Field(None, gt=0)
    """share of this source in each epoch, relative to the other weights"""
    count: int | None = Field(None, ge=1)
    """prompts of this source in each epoch; all its prompts take their turn over the epochs"""
    verifier: tuple[str, ...] | None = Field(None, strict=False)
    """takes the place of what the rows say; a name, my_module:my_function, or a list of them"""
    prompt_column: str | None = None
    answer_column: str | None = None
    options: dict[str, Any] = {}
    """of the task, for reasoning_gym"""

    @model_validator(mode="before")
    @classmethod
    def _one_verifier(cls, values: object) -> object:
        return _as_list(values, "verifier")

    @model_validator(mode="after")
    def _keys_agree(self) -> "SourceSection":
        if self.weight is not None and self.count is not None:
            raise ValueError(f"data source {self.path!r} has both a weight and a count; keep one")
        if self.streaming and self.limit is None:
            raise ValueError(
                f"data source {self.path!r} is streamed without an end; set `limit` to the number of rows to read"
            )
        if self.options and not self.path.startswith(PROCEDURAL):
            raise ValueError(f"data source {self.path!r} has options, which only {PROCEDURAL}TASK takes")
        return self


class DataSection(Section):
    train: tuple[SourceSection, ...] = Field(min_length=1, strict=False)
    """where prompts come from: a path, a table {path, weight, ...}, or a list of them"""
    apply_chat_template: bool | Literal["auto"] = "auto"
    """auto: when the prompts are chat messages, or the tokenizer has a chat template"""
    system_prompt: str | None = None
    shuffle: bool = True

    @model_validator(mode="before")
    @classmethod
    def _paths_are_sources(cls, values: object) -> object:
        values = _as_list(values, "train")
        if isinstance(values, dict) and isinstance(values.get("train"), list | tuple):
            sources = tuple({"path": source} if isinstance(source, str) else source for source in values["train"])
            return {**values, "train": sources}
        return values

    @model_validator(mode="after")
    def _all_or_none_weighted(self) -> "DataSection":
        weighted = [source.weight is not None for source in self.train]
        if any(weighted) and not all(weighted):
            source = self.train[weighted.index(False)]
            raise ValueError(f"data.train: {source.path!r} has no weight, but others have; give all one, or none")
        return self


class RewardSection(Section):
    verifier: tuple[str, ...] | None = Field(None, strict=False)
    """name or my_module:my_function, or a list of them, whose rewards are added; None takes each row's own"""
    weights: dict[str, float] = {}
    """of verifiers, by name, where several judge one row; 1 if not named"""
    remap: dict[str, str] = {}
    """verifiers that take the place of those the rows name: {old = "new"}"""
    scale: float = Field(1.0, gt=0)
    """multiplies every reward"""
    timeout_seconds: float = Field(30.0, gt=0)
    workers: int = Field(1, ge=1)
    """verifier processes"""
    code_api_url: str | None = None
    """a code server in place of this machine's sandbox; None takes CODE_API_URL"""
    code_seconds: float = Field(1.0, gt=0)
    """CPU time of a program for each test"""
    code_memory_mb: int = Field(1024, ge=64)
    code_pass_threshold: float = Field(0.0, ge=0, le=1)
    """share of tests below which a program's reward is 0"""
    judge_url: str | None = None
    """OpenAI-compatible endpoint of the judge; None takes OPENAI_BASE_URL"""
    judge_model: str | None = None
    judge_max_tokens: int = Field(2048, ge=1)
    judge_concurrency: int = Field(32, ge=1)
    """questions the judge is asked at once"""
    judge_requests_per_second: float | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _one_verifier(cls, values: object) -> object:
        return _as_list(values, "verifier")

    @model_validator(mode="after")
    def _weights_count(self) -> "RewardSection":
        for name, weight in self.weights.items():
            if weight == 0 or not math.isfinite(weight):
                raise ValueError(f"reward.weights: {name} = {weight}; a weight is a number other than 0")
        return self


class RolloutSection(Section):
    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(8, ge=1)
    max_prompt_tokens: int = Field(2048, ge=1)
    max_response_tokens: int = Field(2048, ge=1)
    async_steps: int = Field(1, ge=0)
    """batches of groups in hand beyond the one being trained; 0 is synchronous"""
    window: int | None = Field(None, ge=0)
    """no trained group is older than this many policy versions; None is 2 * async_steps"""
    active_sampling: bool = True
    """refill the batch until it holds prompts_per_step groups that carry signal"""

    @property
    def staleness_window(self) -> int:
        return 2 * self.async_steps if self.window is None else self.window

    @model_validator(mode="after")
    def _window_is_wide_enough(self) -> "RolloutSection":
        if self.window is not None and self.window < self.async_steps:
            raise ValueError(
                f"window = {self.window} is below async_steps = {self.async_steps}; raise it or leave it out"
            )
        return self


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    stop: tuple[str, ...] = Field((), strict=False)


class InferenceSection(Section):
    workers: int = Field(1, ge=1)
    max_workers: int | None = Field(None, ge=1)
    """elastic: while the cluster has room, for instance on nodes that join, up to so many; None is `workers`"""
    device: Device = "auto"
    gpu_type: str | None = None
    """on a cluster with several kinds of GPU: which, by the name Ray has for it ("H100"); None takes any"""
    max_num_seqs: int = Field(64, ge=1)
    """samples decoded at once by one worker"""
    kv_cache_tokens: int = Field(65536, ge=1)
    block_size: int = Field(16, ge=1)
    max_tokens_per_step: int = Field(2048, ge=1)
    prefix_caching: bool = True
    batching: Literal["continuous", "static"] = "continuous"
    """static: the slot of a finished sample stays empty until its whole batch is done; the baseline of comparisons"""
    threads: int | None = Field(None, ge=1)
    """torch threads of a worker on CPU; None shares the cores between all workers"""

    @property
    def most_workers(self) -> int:
        return self.max_workers or self.workers

    @model_validator(mode="after")
    def _most_is_no_less(self) -> "InferenceSection":
        if self.most_workers < self.workers:
            raise ValueError(f"max_workers = {self.max_workers} is below workers = {self.workers}")
        return self


class LearnerSection(Section):
    workers: int = Field(1, ge=1)
    """ranks; the model is sharded over them"""
    device: Device = "auto"
    gpu_type: str | None = None
    """as inference.gpu_type"""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    step_timeout_seconds: float = Field(3600.0, gt=0)
    """how long a training step, a save or an export may take before a learner counts as lost"""
    activation_checkpointing: bool = False
    shard_size: int | None = Field(None, ge=1)
    """ranks that share one copy of the model, the others holding replicas (HSDP); None shards over all ranks"""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    threads: int | None = Field(None, ge=1)


class LossSection(Section):
    objective: Literal["grpo", "gspo", "cispo"] = "grpo"
    """gspo: one ratio for a whole sample; cispo: beyond clip_high a token's weight is bounded, not its gradient cut"""
    clip_low: float = Field(0.2, ge=0, le=1)
    clip_high: float = Field(0.272, ge=0)
    importance_cap: float = Field(2.0, gt=0)
    importance_band: tuple[float, float] | None = Field(None, strict=False)
    """[low, high]: tokens whose importance ratio lies outside are left out of the loss (IcePop)"""
    kl_beta: float = Field(0.0, ge=0)
    """weight of the KL term; above 0 a second copy of the model is loaded as the reference"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    denominator: float | None = Field(None, gt=0)
    """a constant to divide the summed loss by; None: the number of trained tokens of the optimizer step"""
    advantage: Literal["centered", "standardized", "leave_one_out"] = "centered"
    mask_truncated: bool = False
    """keep samples that hit the length limit out of the loss"""
    allow_truncated_sampling: bool = False
    """train although top_k, top_p, min_p or a penalty make the recorded logprobs unreproducible"""


class OptimSection(Section):
    mini_batches: int = Field(1, ge=1)
    """optimizer steps that a batch is cut into"""
    epochs: int = Field(1, ge=1)
    """passes over a batch before the next one"""
    lr: float = Field(1e-6, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class SyncSection(Section):
    mode: Literal["inflight", "pause", "drain"] = "inflight"
    """inflight: engines decode while weights arrive; pause: they stand still; drain: they first finish all requests"""
    kv: Literal["keep", "recompute"] = "keep"
    """what running requests do with their KV cache at an update"""
    transport: Literal["auto", "nccl", "gloo"] = "auto"
    bucket_mb: int = Field(64, ge=1)
    timeout_seconds: float = Field(120.0, gt=0)
    """deadline of each wait of an update"""
    canary_sequences: int = Field(64, ge=0)
    """fixed sequences scored by engine and learner after every update; 0 turns it off"""
    canary_tokens: int = Field(32, ge=2)


class CheckpointSection(Section):
    every: int = Field(100, ge=1)
    """steps"""
    keep: int = Field(2, ge=1)
    export: bool = True
    """write a Hugging Face folder at the end"""


class EvalSection(Section):
    data: str | None = None
    every: int = Field(0, ge=0)
    """steps; 0: only before and after the run"""
    limit: int | None = Field(None, ge=1)
    samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_response_tokens: int | None = None
    """None takes rollout.max_response_tokens"""
    seed: int = 1234


class LoggingSection(Section):
    console: bool = True
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online with WANDB_API_KEY set, else offline"""
    wandb_project: str = "olmorl"
    rollouts: bool = True
    """write every sample of every step to parquet"""


class ClusterSection(Section):
    address: str | None = None
    """address of a running Ray cluster; None takes RAY_ADDRESS, else starts one on this machine"""
    nodes: int = Field(1, ge=1)
    """a run begins when so many have joined the cluster"""
    start_timeout_seconds: float = Field(300.0, gt=0)
    """how long nodes may take to join, and workers to start"""
    heartbeat_seconds: float = Field(10.0, gt=0)
    """a worker that is silent for so long is lost: an inference worker is replaced, a learner starts the run again"""
    max_restarts: int = Field(8, ge=0)
    """inference workers that break and are replaced, in all; one that is lost with its node is not counted"""
    min_inference_workers: int = Field(1, ge=1)
    """with fewer left, and none to come within start_timeout_seconds, the run stops with its checkpoint; after a lost
    learner it starts again with so many, and more join as there is room"""
    max_run_restarts: int = Field(2, ge=0)
    """attempts after a lost learner, each from the newest complete checkpoint"""


class Config(Section):
    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    inference: InferenceSection = InferenceSection()
    learner: LearnerSection = LearnerSection()
    loss: LossSection = LossSection()
    optim: OptimSection = OptimSection()
    sync: SyncSection = SyncSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        s = self.sampling
        truncates = s.top_k > 0 or s.top_p < 1 or s.min_p > 0 or s.repetition_penalty != 1
        if truncates and not self.loss.allow_truncated_sampling:
            raise ValueError(
                "[sampling] truncates the distribution (top_k, top_p, min_p or repetition_penalty), so the learner "
                "cannot reproduce the recorded logprobs; set loss.allow_truncated_sampling = true to train anyway"
            )
        band = self.loss.importance_band
        if band is not None and not 0 <= band[0] < band[1]:
            raise ValueError(f"loss.importance_band = {list(band)} is not [low, high] with 0 <= low < high")
        least, workers = self.cluster.min_inference_workers, self.inference.workers
        if least > workers:
            raise ValueError(f"cluster.min_inference_workers = {least} is above inference.workers = {workers}")
        size, ranks = self.learner.shard_size, self.learner.workers
        if size is not None and ranks % size:
            raise ValueError(f"learner.shard_size = {size} does not divide learner.workers = {ranks}")
        if self.loss.advantage == "leave_one_out" and self.rollout.samples_per_prompt < 2:
            raise ValueError("loss.advantage = 'leave_one_out' needs rollout.samples_per_prompt >= 2")
        return self
