"""Every knob of a run, in the sections of its TOML file. No torch here: a config is read on any machine.

A field's docstring is its help text. What a section needs beyond its own fields is checked in `Config` at the end.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from olmorl.config.data_sections import DataSection, EvalSection, RewardSection
from olmorl.config.section import WITHOUT_NUL, PathText, Section

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class RunSection(Section):
    name: PathText = "run"
    """the run directory is <output_dir>/<name>"""
    output_dir: Annotated[Path, WITHOUT_NUL] = Field(Path("outputs"), strict=False)
    seed: int = 0
    steps: int = Field(100, ge=1)
    """optimizer steps in all"""

    @property
    def directory(self) -> Path:
        return self.output_dir / self.name

    @model_validator(mode="after")
    def _name_stays_inside(self) -> "RunSection":
        parts = Path(self.name).parts
        if not parts or ".." in parts or Path(self.name).is_absolute():
            raise ValueError(f"run.name = {self.name!r} is no folder inside run.output_dir; set run.output_dir instead")
        return self


class ModelSection(Section):
    path: PathText
    """local Hugging Face folder or hub id"""
    dtype: Dtype = "auto"
    """auto: float32 on CPU, bfloat16 on CUDA"""


class RolloutSection(Section):
    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(8, ge=2)
    """the group whose rewards are compared; one alone has nothing to be compared with"""
    max_prompt_tokens: int = Field(2048, ge=1)
    max_response_tokens: int = Field(2048, ge=1)
    """with an environment: all turns and observations together"""
    async_steps: int = Field(1, ge=0)
    """batches of groups in hand beyond the one being trained; 0 is synchronous"""
    window: int | None = Field(None, ge=0)
    """no trained group is older than this many policy versions; None is 2 * async_steps"""
    active_sampling: bool = True
    """refill the batch until it holds prompts_per_step groups that carry signal"""
    environment: str | None = None
    """a name or my_module:MyClass for all prompts; None takes what sources and rows say"""
    oversampling: int | None = Field(None, ge=1)
    """in place of active sampling: draw this multiple of prompts_per_step for each step, train at most
    prompts_per_step of those with signal and drop the rest, as DAPO does; batches vary in size"""
    max_overtaken: int | None = Field(None, ge=0)
    """older groups, still under way, that a batch may leave behind; 0 keeps the order of admission, so that groups
    that end early are not trained first; None: any number"""
    no_resampling_pass_rate: float | None = Field(None, gt=0, le=1)
    """a prompt whose group passed at this rate or above is not served again"""
    rest_steps: int = Field(0, ge=0)
    """a prompt whose group all failed alike is not served for so many steps, twice as many each further time; 0: off"""
    starvation_patience: int = Field(64, ge=1)
    """batches' worth of groups that may come without filling one; from half of it on, admission slows down"""
    on_starvation: Literal["stop", "train_partial"] = "stop"
    """what then happens: the run stops with its checkpoint, or it trains what groups there are (stops if none)"""

    @property
    def staleness_window(self) -> int:
        return 2 * self.async_steps if self.window is None else self.window

    @model_validator(mode="after")
    def _one_way_to_fill_a_batch(self) -> "RolloutSection":
        if self.oversampling is not None and self.active_sampling:
            raise ValueError("rollout.oversampling takes the place of active sampling; set active_sampling = false")
        return self

    @model_validator(mode="after")
    def _window_is_wide_enough(self) -> "RolloutSection":
        if self.window is not None and self.window < self.async_steps:
            raise ValueError(
                f"window = {self.window} is below async_steps = {self.async_steps}; raise it or leave it out"
            )
        return self


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), strict=False)


class InferenceSection(Section):
    workers: int = Field(1, ge=1)
    max_workers: int | None = Field(None, ge=1)
    """elastic: while the cluster has room, for instance on nodes that join, up to so many; None is `workers`"""
    device: Device = "auto"
    gpu_share: float = Field(1.0, gt=0, le=1)
    """of a GPU's memory that a worker may take. With shares that sum to 1 at most, one GPU holds both roles"""
    gpu_type: str | None = None
    """on a cluster with several kinds of GPU: which, by the name Ray has for it ("H100"); None takes any"""
    max_num_seqs: int = Field(64, ge=1)
    """samples decoded at once by one worker"""
    kv_cache_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = 65536
    """auto: as many as the worker's GPU has room for"""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """of the GPU, or of its gpu_share, what a worker with kv_cache_tokens = "auto" may fill"""
    block_size: int = Field(16, ge=1)
    max_tokens_per_step: int = Field(2048, ge=1)
    prefix_caching: bool = True
    batching: Literal["continuous", "static"] = "continuous"
    """static: the slot of a finished sample stays empty until its whole batch is done; the baseline of comparisons"""
    quantization: Literal["int8", "int4"] | None = None
    """rollouts with weights of so many bits, quantised anew at every update"""
    quantize_head: bool = False
    """the head too: faster, and further from the learner's logprobs"""
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """int8: keys and values in a quarter to a half of the memory, on a CPU"""
    speculative: Literal["suffix", "model"] | None = None
    """guess the next tokens and judge several in one step; tokens and logprobs stay what they are. suffix: from what
    the samples of a prompt have said; model: by draft_model"""
    draft_model: str | None = Field(None, min_length=1)
    """folder or hub id of a smaller model with the same vocabulary; it stays as it is while the policy is trained"""
    speculative_tokens: int = Field(7, ge=1)
    """guessed at once for one sample, at most"""
    speculative_step_tokens: int = Field(16, ge=0)
    """guesses are made while a step has fewer tokens than that, and fill it up: with so many samples running, none.
    0: measured by each worker at its start, up to where a step costs a third more than one of a single token"""
    tensor_parallel: int = Field(1, ge=1)
    """devices of one machine that each worker divides its model among"""
    overlap: bool | None = None
    """launch a step before the tokens of the last one are read; None: on a GPU"""
    cuda_graphs: bool | None = None
    """replay decode steps in place of launching them kernel by kernel; None: on a GPU"""
    threads: int | None = Field(None, ge=1)
    """torch threads of a worker on CPU, of each rank of it; None shares the cores between all"""

    @property
    def most_workers(self) -> int:
        return self.max_workers or self.workers

    @model_validator(mode="after")
    def _most_is_no_less(self) -> "InferenceSection":
        if self.most_workers < self.workers:
            raise ValueError(f"max_workers = {self.max_workers} is below workers = {self.workers}")
        return self

    @model_validator(mode="after")
    def _draft_model_has_its_place(self) -> "InferenceSection":
        if (self.draft_model is not None) != (self.speculative == "model"):
            raise ValueError("draft_model and speculative = 'model' go together: give both, or none")
        if self.draft_model is not None and (self.tensor_parallel > 1 or self.kv_cache_tokens == "auto"):
            raise ValueError(
                f"a draft model computes on one device beside a KV cache of a given size; tensor_parallel is "
                f"{self.tensor_parallel}, kv_cache_tokens is {self.kv_cache_tokens!r}; set 1 and a number, or "
                "speculative = 'suffix'"
            )
        return self


class LearnerSection(Section):
    workers: int = Field(1, ge=1)
    """ranks; the model is sharded over them"""
    device: Device = "auto"
    gpu_share: float = Field(1.0, gt=0, le=1)
    """as inference.gpu_share"""
    gpu_type: str | None = None
    """as inference.gpu_type"""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    step_timeout_seconds: float = Field(3600.0, gt=0)
    """how long a training step, a save or an export may take before a learner counts as lost"""
    activation_checkpointing: bool = False
    compile: bool = False
    """decoder layers by torch.compile, which needs a compiler for C++ (on a GPU for C); the first steps wait for it"""
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
    kl_beta: float = Field(0.0, ge=0, allow_inf_nan=False)
    """weight of the KL term; above 0 a second copy of the model is loaded as the reference"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    denominator: float | None = Field(None, gt=0, allow_inf_nan=False)
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
    lr: float = Field(1e-6, ge=0, allow_inf_nan=False)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(1.0, gt=0)


class SyncSection(Section):
    mode: Literal["inflight", "pause", "drain"] = "inflight"
    """inflight: engines decode while weights arrive; pause: they stand still; drain: they first finish all requests"""
    kv: Literal["keep", "recompute"] = "keep"
    """what running requests do with their KV cache at an update"""
    transport: Literal["auto", "nccl", "ipc", "gloo"] = "auto"
    """ipc: engines map the learner's copy, on one GPU or one machine with both roles; auto: ipc where they share a
    GPU, nccl between GPUs, else gloo"""
    staging: Literal["auto", "device", "host", "none"] = "auto"
    """where an update of B bytes waits for its commit: device: B more beside the weights; host: B of the host's memory,
    a longer swap; none: no more than a bucket, but the engine stands still while it receives; auto: device if it has
    room, else host. With ipc it stays with the learner"""
    bucket_mb: int = Field(64, ge=1)
    timeout_seconds: float = Field(120.0, gt=0)
    """deadline of each wait of an update"""
    canary_sequences: int = Field(64, ge=0)
    """fixed sequences scored by engine and learner after every update; 0 turns it off"""
    canary_tokens: int = Field(32, ge=2)
    parity_prompts: int = Field(4, ge=0)
    """prompts that the engines answer and the learner scores before the first training step, at least one for each
    engine; the run refuses to train when their logprobs differ. 0 turns it off"""
    parity_tolerance: float | None = Field(None, gt=0)
    """nats that they may differ by in the mean, a single token by ten times as much; None: 1e-5 in float32, else 1e-2
    in the mean alone"""


class CheckpointSection(Section):
    every: int = Field(100, ge=1)
    """steps"""
    keep: int = Field(2, ge=1)
    keep_versions: int = Field(0, ge=0)
    """weights of so many newest versions that stay, a copy of the model each, so that `olmorl replay` can draw their
    rollouts again; 0: those of checkpoints alone"""
    export: bool = True
    """write a Hugging Face folder at the end"""


class LoggingSection(Section):
    console: bool = True
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online with WANDB_API_KEY set, else offline"""
    wandb_project: str = "olmorl"
    rollouts: bool = True
    """write every sample of every step to parquet"""
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """port of the driver's Prometheus endpoint, which also tells of every worker; 0 takes a free one, None has none"""
    prometheus_host: str = "127.0.0.1"
    timeline_seconds: float = Field(1.0, ge=0)
    """how often what each worker does is written to timeline.jsonl; 0 writes none"""
    schedule: bool = False
    """write down what each engine did in which step, for `olmorl replay-schedule`, and the weights of every version: a
    copy of the model each"""


class ClusterSection(Section):
    address: str | None = None
    """address of a running Ray cluster; None takes RAY_ADDRESS, else starts one on this machine"""
    nodes: int = Field(1, ge=1)
    """a run begins when so many have joined the cluster"""
    split: Literal["given", "auto"] = "given"
    """auto: the planner divides the GPUs that are there: it sets inference.workers, inference.tensor_parallel,
    inference.max_num_seqs and learner.workers"""
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

    @property
    def max_model_tokens(self) -> int:
        """The longest sequence an engine may meet: prompt and response, of training or evaluation."""
        rollout = self.rollout
        responses = rollout.max_response_tokens, self.eval.max_response_tokens or 0
        return rollout.max_prompt_tokens + max(responses)

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
        if self.cluster.split == "given":  # else these counts are not the run's
            self._check_counts()
        self._check_shared_gpu()
        self._check_quantization()
        return self

    @property
    def shares_gpu(self) -> bool:
        """True when inference and learner workers are to lie on one GPU."""
        return self.inference.gpu_share < 1 and self.learner.gpu_share < 1

    def _check_counts(self) -> None:
        least, workers = self.cluster.min_inference_workers, self.inference.workers
        if least > workers:
            raise ValueError(f"cluster.min_inference_workers = {least} is above inference.workers = {workers}")
        size, ranks = self.learner.shard_size, self.learner.workers
        if size is not None and ranks % size:
            raise ValueError(f"learner.shard_size = {size} does not divide learner.workers = {ranks}")

    def _check_quantization(self) -> None:
        inference = self.inference
        if inference.quantization is None:
            if inference.quantize_head:
                raise ValueError(
                    "inference.quantize_head needs inference.quantization; set inference.quantization = 'int8'"
                )
            return
        if inference.tensor_parallel > 1:
            raise ValueError(
                f"inference.quantization = {inference.quantization!r} computes on one device; "
                f"inference.tensor_parallel is {inference.tensor_parallel}, set it to 1"
            )
        if self.logging.schedule:
            raise ValueError(
                f"logging.schedule keeps whole weights, of which inference.quantization = {inference.quantization!r} "
                "leaves none; set one of them alone"
            )

    def _check_shared_gpu(self) -> None:
        inference, learner, sync = self.inference, self.learner, self.sync
        if sync.transport == "ipc" and sync.staging in ("host", "none"):
            raise ValueError(
                f"sync.staging = {sync.staging!r} has no meaning with sync.transport = 'ipc', where engines read the "
                "learner's own copy; leave it out"
            )
        if (inference.gpu_share < 1) != (learner.gpu_share < 1):
            raise ValueError("inference.gpu_share and learner.gpu_share go together: give both, or none")
        if self.shares_gpu:
            if self.cluster.split == "auto":
                raise ValueError(
                    "cluster.split = 'auto' divides whole GPUs; with gpu_share both roles have one, leave it out"
                )
            taken = inference.workers * inference.gpu_share + learner.workers * learner.gpu_share
            if learner.workers > 1 or taken > 1 + 1e-6:
                raise ValueError(
                    f"gpu_share puts {inference.workers} inference and {learner.workers} learner workers on one GPU, "
                    f"{taken:g} of it in all; it holds one learner worker and shares that sum to 1 at most"
                )
            if inference.most_workers > inference.workers:
                raise ValueError(
                    "inference.max_workers has no meaning with gpu_share, which puts all workers on one GPU"
                )
            if sync.transport == "nccl":
                raise ValueError("sync.transport = 'nccl' refuses two workers on one GPU; set 'ipc' or 'auto'")
