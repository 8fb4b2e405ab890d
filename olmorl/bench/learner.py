"""The learner on a recorded batch: tokens a second, how much of what the device can do that is, and peak memory.

A batch is a list of {"prompt": [ids], "tokens": [ids], "advantage": a, "logprobs": [...]}, one entry a sample. It is
trained several times at a learning rate of 0, so that every step does the same work.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from learner.pack import pack
from olmorl.contract.errors import ConfigError
from olmorl.contract.training import LearnerConfig, RankBatch, StepReport, TrainSample
from olmorl.metrics.rollout_log import read_rollouts, rollout_files

if TYPE_CHECKING:
    from learner.worker import LearnerWorker

_KEYS = ("prompt", "tokens", "advantage", "logprobs")


def read_batch(path: Path) -> list[TrainSample]:
    """A JSON file, or what the last step of a run trained."""
    if path.is_dir():
        rows = [row for row in read_rollouts(rollout_files(path)[-1]) if row.fate == "trained"]
        if not rows:
            raise ConfigError(f"the last step of {path} trained nothing that is written down")
        return [_train_sample(row.prompt_token_ids, row.token_ids, row.logprobs, row.advantage or 0.0) for row in rows]
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a batch: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} is not a batch: it must be a list of entries, and not an empty one")
    return [_sample(entry, f"{path}: entry {index}") for index, entry in enumerate(entries)]


def _sample(entry: Any, where: str) -> TrainSample:
    missing = [key for key in _KEYS if not isinstance(entry, dict) or key not in entry]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; an entry has {', '.join(_KEYS)}")
    try:
        prompt, tokens = (np.array(entry[key], np.int32) for key in ("prompt", "tokens"))
        logprobs, advantage = np.array(entry["logprobs"], np.float32), float(entry["advantage"])
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where} holds what is no number: {error}") from None
    if len(prompt) == 0 or len(logprobs) != len(tokens):
        raise ConfigError(f"{where} has {len(prompt)} prompt tokens (at least 1), {len(tokens)} tokens and "
                          f"{len(logprobs)} logprobs (as many)")  # fmt: skip
    return _train_sample(prompt, tokens, logprobs, advantage)


def _train_sample(prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, advantage: float) -> TrainSample:
    return TrainSample(
        prompt_token_ids=prompt,
        token_ids=tokens,
        logprobs=logprobs,
        token_versions=np.zeros(len(tokens), np.int32),
        loss_mask=np.ones(len(tokens), bool),
        advantage=advantage,
    )


def bench_learner(
    model: str, batch: Path, options: Mapping[str, Any], *, tokens_per_micro_batch: int, steps: int
) -> dict[str, Any]:
    """Loading and one step are not timed. `options` are fields of LearnerConfig.

    `tokens` are those of the samples, each with its prompt, whether or not it was computed with others of that prompt.
    `short_seconds` is a step on the first quarter of the samples: both together tell what a step costs beside them.
    """
    samples = read_batch(batch)
    from learner.worker import LearnerWorker

    worker = LearnerWorker(LearnerConfig(model=model, lr=0.0, **options), rank=0, world_size=1)
    worker.start(*worker.host_rendezvous())
    try:
        peak = worker.info()
        reports = [_step(worker, samples, version, tokens_per_micro_batch) for version in range(steps + 1)][1:]
        some = samples[: -(-len(samples) // 4)]
        short = [_step(worker, some, version, tokens_per_micro_batch) for version in range(steps + 1, 2 * steps + 1)]
    finally:
        worker.shutdown()
    tokens = sum(len(sample.prompt_token_ids) + len(sample.token_ids) for sample in samples)
    seconds = statistics.median(report.seconds for report in reports)
    return {
        "tokens": tokens,
        "tokens_computed": reports[0].num_tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": reports[0].flops / seconds / peak.peak_flops,
        "flops": reports[0].flops,
        "short_flops": short[0].flops,
        "short_seconds": statistics.median(report.seconds for report in short),
        "peak_bytes": max(report.peak_bytes for report in reports),
        "peak_tflops": peak.peak_flops / 1e12,
        "peak_source": peak.peak_source,
        "steps": steps,
    }


def train_for_ever(
    model: str,
    samples: list[TrainSample],
    options: Mapping[str, Any],
    *,
    tokens_per_micro_batch: int,
    on_step: Callable[[], None],
) -> None:
    """Work beside which something else is measured."""
    from learner.worker import LearnerWorker

    worker = LearnerWorker(LearnerConfig(model=model, lr=0.0, **options), rank=0, world_size=1)
    worker.start(*worker.host_rendezvous())
    for version in itertools.count():
        _step(worker, samples, version, tokens_per_micro_batch)
        on_step()


def _step(worker: "LearnerWorker", samples: list[TrainSample], version: int, limit: int) -> StepReport:
    batch: RankBatch
    (batch,) = pack(samples, version=version, num_ranks=1, tokens_per_micro_batch=limit)
    return worker.train_step(batch)
