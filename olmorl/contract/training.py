"""What the driver hands to the learners, and what they say back.

N is the number of tokens of a packed micro-batch, D its documents. A document is prompt and response of a sample; where
samples of one prompt lie together, the prompt is a document of its own and each response one whose parent it is, so
that the prompt is computed once. Position t of every array speaks of token t: `behaviour_logprobs[t]` is the logprob
under which token t was drawn.
"""

from dataclasses import dataclass

import numpy as np

from olmorl.contract.errors import ConfigError

LEARNER_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One scored sample with its advantage, before packing. P prompt tokens, T response tokens."""

    prompt_token_ids: np.ndarray  # [P] int32
    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, recorded when each token was drawn
    token_versions: np.ndarray  # [T] int32, policy version that drew each token
    loss_mask: np.ndarray  # [T] bool, False keeps a token out of numerator and denominator
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Documents laid one behind the other, no padding. A parent stands before its children."""

    token_ids: np.ndarray  # [N] int32
    position_ids: np.ndarray  # [N] int32, of a document from 0, of a child from the end of its parent
    document_starts: np.ndarray  # [D + 1] int32, cumulative lengths
    parents: np.ndarray  # [D] int32, the document that is read before this one, -1 for none
    samples: np.ndarray  # [D] int32, place of its sample among those that were packed, -1 for a prompt that some share
    loss_mask: np.ndarray  # [N] bool, True on response tokens that are trained
    advantages: np.ndarray  # [N] float32
    behaviour_logprobs: np.ndarray  # [N] float32
    token_versions: np.ndarray  # [N] int32, -1 on prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """One rank's share of one optimizer step. Every rank has the same number of micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int
    """unmasked response tokens of this optimizer step over all ranks and micro-batches: the loss denominator"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One rank's share of one training step, which is one optimizer step for each mini-batch and epoch."""

    version: int
    """policy version the step trains; the step makes version + 1"""
    mini_batches: tuple[MiniBatch, ...]

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        return tuple(micro for mini in self.mini_batches for micro in mini.micro_batches)

    @property
    def num_loss_tokens(self) -> int:
        return sum(mini.num_loss_tokens for mini in self.mini_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a rank says of one training step. `metrics` are already reduced over all ranks."""

    version: int
    """policy version after the step"""
    stepped: bool
    """False when the optimizer was not stepped: no signal, or a loss or gradient that is not finite"""
    metrics: dict[str, float]
    seconds: float
    num_tokens: int
    """of this rank's share; a prompt that samples share counts once, as it is computed"""
    flops: float
    peak_bytes: int
    """most memory held during the step: of the device, on CPU of the process"""
    old_logprobs: np.ndarray  # [R] float32
    """of the trained tokens of this rank's share, in order, under the policy before the step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Sequences to be scored by the learner and, at temperature 1, by an engine."""

    sequences: tuple[np.ndarray, ...]  # each [L] int32, L >= 2
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Everything a learner rank is built from."""

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    gpu_share: float = 1.0  # of the device's memory that this process may take
    activation_checkpointing: bool = False
    compile: bool = False
    logprob_chunk_tokens: int = 1024
    shard_size: int | None = None  # ranks that share one copy of the model; None: all of them
    temperature: float = 1.0
    objective: str = "grpo"  # "grpo", "gspo" or "cispo"
    clip_low: float = 0.2
    clip_high: float = 0.272
    importance_cap: float = 2.0
    importance_band: tuple[float, float] | None = None
    kl_beta: float = 0.0
    kl_estimator: str = "k3"  # "k1", "k2" or "k3"
    loss_denominator: float | None = None  # None: the trained tokens of the optimizer step
    epochs: int = 1
    lr: float = 1e-6
    schedule: str = "constant"  # "constant", "linear" or "cosine"
    warmup_steps: int = 0
    total_steps: int = 1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_nonfinite_steps: int = 3
    nonfinite_dir: str | None = None  # where the batch of a skipped step is kept
    seed: int = 0
    wire_dtype: str = "float32"


def check_learner_dtype(dtype: str) -> None:
    """ConfigError for what a learner cannot compute in. "auto" is told by the device, and never among them."""
    if dtype == "float16":
        raise ConfigError(
            "a learner in float16 loses small gradients, as it does not scale its loss; set model.dtype = 'bfloat16', "
            "or 'float32' where a device has no bfloat16"
        )
    if dtype not in ("auto", *LEARNER_DTYPES):
        raise ConfigError(f"the learner's dtype is {dtype!r}; it must be one of {', '.join(LEARNER_DTYPES)}")
