"""Evaluation without a run: one engine in this process, and else what a run does."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inference.model.architecture import read_architecture
from olmorl.config.schema import Config
from olmorl.contract.errors import WorkerError
from olmorl.controller.cluster import Remote
from olmorl.controller.compose import environments_of, load_encoder
from olmorl.controller.evaluate import Evaluation, evaluate, load_eval_sets
from olmorl.controller.fleet import engine_config
from olmorl.controller.placement import plan_placement
from olmorl.controller.rollout import RolloutService
from olmorl.controller.scoring import Scorer, verifiers_to_load
from olmorl.data.tokenizer import find_model


class LocalWorker(Remote):
    """A worker of this process behind the same calls."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker.name, actor=None)
        self._worker = worker

    def kill(self) -> None:
        self._worker.shutdown()

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        async with asyncio.timeout(timeout):
            return await asyncio.to_thread(getattr(self._worker, method), *args)


async def evaluate_model(
    config: Config,
    *,
    version: int = 0,
    on_start: Callable[[int], None] = lambda total: None,
    on_scored: Callable[[int], None] = lambda count: None,
) -> list[Evaluation]:
    """model.path on the sets of eval.data. `on_start` is told how many samples there will be, `on_scored` how many more
    are done. Bad input is refused before the model is loaded."""
    encoder = load_encoder(config)
    sets = load_eval_sets(config, encoder)
    prompts = [prompt for one in sets for prompt in one.prompts]
    named = [check.verifier for prompt in prompts for check in prompt.checks]
    scorer = await Scorer.start(
        config.reward,
        verifiers=verifiers_to_load(config.reward, named),
        environments=environments_of(prompt.environment for prompt in prompts),
        tokenizer=encoder.tokenizer,
    )
    try:
        await scorer.check_truths(prompts)
        engine = await asyncio.to_thread(_start_engine, config, version)
        failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        service = RolloutService(on_lost=lambda name, reason: _fail(failed, reason))
        try:
            service.ensure_worker(engine)
            on_start(sum(len(one.prompts) * one.samples_per_prompt for one in sets))
            work: asyncio.Future[Any] = asyncio.ensure_future(
                evaluate(sets, config=config, service=service, scorer=scorer, version=version, on_scored=on_scored)
            )
            await asyncio.wait([work, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                work.cancel()
                failed.result()
            evaluations: list[Evaluation] = await work
            return evaluations
        finally:
            engine.kill()
            await service.close()
    finally:
        await scorer.close()


def _start_engine(config: Config, version: int) -> LocalWorker:
    from inference.worker import InferenceWorker  # brings torch

    wanted = engine_config(config, plan_placement(config))
    length = min(config.max_model_tokens, read_architecture(find_model(config.model.path)).max_positions)
    wanted = replace(wanted, max_model_len=length)
    return LocalWorker(InferenceWorker(wanted, name="inference-0", initial_version=version))


def _fail(failed: "asyncio.Future[None]", reason: str) -> None:
    if not failed.done():
        failed.set_exception(WorkerError(reason))
