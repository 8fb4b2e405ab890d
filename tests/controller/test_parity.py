"""The gate before the first step, with a real engine and a real learner: it passes when they agree, else says why."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from learner.pack import pack
from learner.worker import LearnerWorker
from olmorl.contract.errors import ParityError
from olmorl.contract.generation import RolloutSample, SamplingParams
from olmorl.contract.training import LearnerConfig, TrainSample
from olmorl.controller.parity import (
    COARSE,
    EXACT,
    QUANTIZED,
    ROUNDED,
    Compared,
    Limits,
    ParityGate,
    causes_of,
    parity_limits,
    parity_prompts,
)
from olmorl.controller.rollout import RolloutService

PROMPTS = [np.array([1, 10, 13, 8, 13, 6, 14], np.int32), np.array([1, 5, 13, 9, 14], np.int32)]
PARAMS = SamplingParams(n=8, max_tokens=40)


class Learner:
    def __init__(self, worker: LearnerWorker) -> None:
        self.name = "learner-0"
        self.worker = worker
        self.forgets_temperature = False

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        if self.forgets_temperature:
            args = (replace(args[0], temperature=1.0),)
        return await asyncio.to_thread(getattr(self.worker, method), *args)


@pytest.fixture
def learner(quickstart_config: Callable[..., Any]) -> Iterator[Learner]:
    worker = LearnerWorker(LearnerConfig(model=quickstart_config().model.path, threads=1), rank=0, world_size=1)
    worker.start(*worker.host_rendezvous())
    yield Learner(worker)
    worker.shutdown()


def check(engine: Any, learner: Learner, params: SamplingParams = PARAMS, limits: Limits = EXACT) -> int:
    async def main() -> int:
        service = RolloutService(on_lost=lambda name, reason: pytest.fail(reason))
        service.ensure_worker(engine)
        gate = ParityGate(
            prompts=PROMPTS,
            params=params,
            limits=limits,
            service=service,
            learners=[learner],  # type: ignore[list-item]
            timeout_seconds=60,
        )
        try:
            tokens = await gate.check()
            assert tokens == service.tokens_received
            return tokens
        finally:
            await service.close()

    return asyncio.run(main())


def test_one_model_passes_at_any_temperature(engine: Any, learner: Learner) -> None:
    for params in (PARAMS, replace(PARAMS, temperature=0.7), replace(PARAMS, top_k=5)):
        assert check(engine, learner, params) > 4 * 5


def test_a_temperature_on_one_side_alone_is_found(engine: Any, learner: Learner) -> None:
    learner.forgets_temperature = True
    with pytest.raises(ParityError, match="Likely: the raw logprobs agree, so it is the sampling"):
        check(engine, learner, replace(PARAMS, temperature=0.7))


def test_other_weights_are_refused_and_the_worst_token_named(engine: Any, learner: Learner) -> None:
    sample = TrainSample(
        prompt_token_ids=PROMPTS[0],
        token_ids=np.array([3, 4, 5], np.int32),
        logprobs=np.full(3, -1.0, np.float32),
        token_versions=np.zeros(3, np.int32),
        loss_mask=np.ones(3, bool),
        advantage=1.0,
    )
    batch = pack([sample], version=0, num_ranks=1, tokens_per_micro_batch=64)[0]
    learner.worker._trainer.config = replace(learner.worker._trainer.config, lr=0.05)  # type: ignore[union-attr]
    learner.worker.train_step(batch)
    with pytest.raises(ParityError) as caught:
        check(engine, learner)
    message = str(caught.value)
    for word in (
        "the raw logprobs of",
        "output token",
        "of prompt",
        "by inference-0",
        "(limit 1e-05)",
        "other weights",
    ):
        assert word in message, message
    assert check(engine, learner, limits=parity_limits("float32", tolerance=100.0)) > 0


def test_the_limit_goes_by_the_coarser_dtype() -> None:
    assert parity_limits("float32", "float32", tolerance=None) is EXACT
    assert parity_limits("bfloat16", "float32", tolerance=None) is ROUNDED
    assert parity_limits("bfloat16", tolerance=3e-3) == Limits(3e-3, 3e-2)
    assert parity_limits("float32", "float32", tolerance=None, quantization="int8") is QUANTIZED
    assert parity_limits("float32", "float32", tolerance=None, kv_cache_dtype="int8") is QUANTIZED
    assert parity_limits("float32", tolerance=None, quantization="int4", kv_cache_dtype="int8") is COARSE


def test_prompts_are_long_enough_for_float32() -> None:
    lengths = [1, 3, 2, 7, 9]
    chosen = parity_prompts((np.zeros(length, np.int32) for length in lengths), count=2)
    assert [len(prompt) for prompt in chosen] == [3, 7]


def compared(worker: str, differences: list[float]) -> Compared:
    count = len(differences)
    sample = RolloutSample(
        request_id="r", lease=0, sample_index=0, worker=worker, token_ids=np.zeros(count, np.int32),
        logprobs=np.zeros(count, np.float32), raw_logprobs=np.zeros(count, np.float32), version_spans=(),
        text="", finish_reason="length",
    )  # fmt: skip
    return Compared(0, sample, np.zeros(count), np.array(differences))


def test_causes_go_by_where_the_difference_lies() -> None:
    flat, growing = [0.3] * 16, [0.001 * 2**i for i in range(16)]
    assert "grows along a sample" in causes_of([compared("a", growing)])
    assert "all tokens differ alike" in causes_of([compared("a", flat), compared("b", flat)])
    assert "b alone is off" in causes_of([compared("a", [1e-6] * 16), compared("b", flat)])
    assert compared("a", [np.nan, 0.0]).differences[0] == np.inf
