"""The gate before the first training step: the learner scores what the engines just generated.

Every system of this kind has trained on wrong numbers some day: other weights, another dtype, a temperature applied
on one side, positions that drift. All of these show in the logprobs of a few samples, before they cost a run.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from olmorl.contract.errors import ParityError
from olmorl.contract.generation import RolloutSample, SamplingParams
from olmorl.contract.training import ScoreRequest
from olmorl.controller.cluster import Remote
from olmorl.controller.rollout import RolloutService

log = logging.getLogger(__name__)

SAMPLES = 2  # of each prompt
TOKENS = 64  # of a sample, at most
SHORTEST_PROMPT = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Of |engine - learner| in nats."""

    mean: float
    worst: float


EXACT, ROUNDED, QUANTIZED = Limits(1e-5, 1e-4), Limits(1e-2, math.inf), Limits(0.15, math.inf)
"""int8 weights are 0.05 to 0.075 off, int8 keys and values less"""
COARSE = Limits(1.0, math.inf)
"""int4 weights are 0.2 to 0.7 off"""


def parity_limits(
    *dtypes: str, tolerance: float | None, quantization: str | None = None, kv_cache_dtype: str = "auto"
) -> Limits:
    """What computing in these dtypes, with quantised rollouts or not, may differ by; or `tolerance` as the mean and ten
    times it as the worst."""
    if tolerance is not None:
        return Limits(tolerance, 10 * tolerance)
    if quantization is not None or kv_cache_dtype != "auto":
        return COARSE if quantization == "int4" else QUANTIZED
    return EXACT if all(dtype == "float32" for dtype in dtypes) else ROUNDED


def parity_prompts(prompts: Iterable[np.ndarray], *, count: int) -> list[np.ndarray]:
    """The first `count` that are long enough: over the first tokens of a text float32 itself is 1e-3 nats off, see
    docs/numerics.md."""
    return list(islice((prompt for prompt in prompts if len(prompt) >= SHORTEST_PROMPT), count))


@dataclass(frozen=True, slots=True)
class Compared:
    """One sample: what the engine said of its tokens, and what the learner says of them."""

    prompt: int
    sample: RolloutSample
    engine: np.ndarray  # [T]
    learner: np.ndarray  # [T]

    @property
    def differences(self) -> np.ndarray:
        """[T]; infinite where one of them is no number."""
        return np.nan_to_num(np.abs(self.engine - self.learner), nan=np.inf)


class ParityGate:
    def __init__(
        self,
        *,
        prompts: Sequence[np.ndarray],
        params: SamplingParams,
        limits: Limits,
        service: RolloutService,
        learners: Sequence[Remote],
        timeout_seconds: float,
    ) -> None:
        """`params` as in training; of `prompts` there should be one for each engine at least."""
        self._prompts = prompts
        self._params = replace(params, n=SAMPLES, max_tokens=min(params.max_tokens, TOKENS))
        self._limits = limits
        self._service = service
        self._learners = learners
        self._timeout = timeout_seconds

    async def check(self) -> int:
        """The number of tokens it took. ParityError names the worst token and what may be the cause."""
        if not self._prompts:
            return 0
        groups = await asyncio.gather(*(self._generate(number) for number in range(len(self._prompts))))
        samples = [(number, sample) for number, group in enumerate(groups) for sample in group]
        for number, sample in samples:
            if sample.error is not None:
                raise ParityError(
                    f"{sample.worker} could not answer prompt {number} of the parity gate: {sample.error}"
                )
        raw = await self._compare(samples, [s.raw_logprobs for _, s in samples], temperature=1.0)
        self._judge(raw, "raw logprobs", causes_of(raw))
        if not self._params.truncates:
            temperature = self._params.temperature
            drawn = await self._compare(samples, [s.logprobs for _, s in samples], temperature=temperature)
            cause = (
                f"the raw logprobs agree, so it is the sampling: its temperature ({temperature:g}) on one side alone"
            )
            self._judge(drawn, "logprobs of the distribution drawn from", cause)
        return sum(len(sample.token_ids) for _, sample in samples)

    async def _generate(self, number: int) -> list[RolloutSample]:
        params = replace(self._params, seed=number)
        arrived: list[RolloutSample] = []
        async for samples in self._service.generate(f"parity/{number}", self._prompts[number], params, priority=-1):
            arrived += samples
        return arrived

    async def _compare(
        self, samples: list[tuple[int, RolloutSample]], engine: list[np.ndarray], *, temperature: float
    ) -> list[Compared]:
        sequences = tuple(np.concatenate([self._prompts[number], s.token_ids]) for number, s in samples)
        request = ScoreRequest(sequences=sequences, temperature=temperature)
        calls = [learner.call("score", request, timeout=self._timeout) for learner in self._learners]
        scores = (await asyncio.gather(*calls))[0]
        return [
            Compared(number, sample, said, score[len(score) - len(said) :])
            for (number, sample), said, score in zip(samples, engine, scores, strict=True)
        ]

    def _judge(self, compared: list[Compared], what: str, causes: str) -> None:
        limits = self._limits
        differences = np.concatenate([one.differences for one in compared])
        mean, worst = float(differences.mean()), float(differences.max())
        log.info("parity of the %s: mean %.2g, worst %.2g nats over %d tokens", what, mean, worst, len(differences))
        if mean <= limits.mean and worst <= limits.worst:
            return
        one = max(compared, key=lambda c: c.differences.max())
        token = int(one.differences.argmax())
        raise ParityError(
            f"engine and learner disagree about the {what} of {len(differences)} tokens just generated: mean "
            f"{mean:.2g} nats (limit {limits.mean:g}), worst {worst:.2g} (limit {limits.worst:g}) at output token "
            f"{token}, id {one.sample.token_ids[token]}, of a sample of prompt {one.prompt} by {one.sample.worker}: "
            f"engine {one.engine[token]:.6g}, learner {one.learner[token]:.6g}. Likely: {causes}. "
            "Importance ratios would be wrong from the first step on; to train in spite of it raise "
            "sync.parity_tolerance, or set sync.parity_prompts = 0"
        )


def causes_of(compared: list[Compared]) -> str:
    """A guess from where along the samples the raw logprobs differ."""
    first = float(np.mean([one.differences[: len(one.differences) // 4 + 1].mean() for one in compared]))
    last = float(np.mean([one.differences[-(len(one.differences) // 4 + 1) :].mean() for one in compared]))
    workers: dict[str, list[float]] = {one.sample.worker: [] for one in compared}
    for one in compared:
        workers[one.sample.worker].append(float(one.differences.mean()))
    means = {name: float(np.mean(values)) for name, values in workers.items()}
    if len(means) > 1 and max(means.values()) > 10 * min(means.values()):
        return f"{max(means, key=lambda name: means[name])} alone is off: its device, its kernels or its weights"
    if last > 10 * first:
        return "the difference grows along a sample: positions (rope scaling, sliding window) or the KV cache"
    return (
        "all tokens differ alike: another dtype (model.dtype), other weights (a tied head, a tensor of another name) "
        "or an architecture that one side computes differently"
    )
