"""Evaluation by a real engine, beside training requests, and what is made of its samples."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from olmorl.config.data_sections import RewardSection
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, SyncError
from olmorl.contract.generation import RolloutSample, SamplingParams
from olmorl.controller.compose import load_encoder
from olmorl.controller.evaluate import EvalSet, Evaluation, eval_params, evaluate, load_eval_sets
from olmorl.controller.group import Group, ScoredSample
from olmorl.controller.rollout import RolloutService
from olmorl.controller.scoring import Scorer

Engine = Any
MakeConfig = Callable[..., Config]
NUM_TRAINING = 30


async def _service(engine: Engine) -> RolloutService:
    def lost(name: str, reason: str) -> None:
        raise AssertionError(f"{name} is lost: {reason}")

    service = RolloutService(on_lost=lost)
    service.ensure_worker(engine)
    return service


def run(engine: Engine, config: Config, *, version: int = 0) -> list[Evaluation]:
    async def main() -> list[Evaluation]:
        service = await _service(engine)
        scorer = await Scorer.start(RewardSection(), verifiers=["gsm8k"])
        sets = load_eval_sets(config, load_encoder(config))
        try:
            return await evaluate(sets, config=config, service=service, scorer=scorer, version=version)
        finally:
            await service.close()
            await scorer.close()

    return asyncio.run(main())


def two_sets(make_config: MakeConfig, *more: str) -> Config:
    path = make_config().eval.data[0].path
    sets = f'eval.data=[{{path="{path}", name="a", samples_per_prompt=3}}, {{path="{path}", limit=2}}]'
    return make_config(sets, *more)


def test_sets_have_names_and_samples_of_their_own(engine: Engine, quickstart_config: MakeConfig) -> None:
    first, second = run(engine, two_sets(quickstart_config, "eval.limit=4"))
    assert (first.set.name, second.set.name) == ("a", "held_out")
    assert [len(g.samples) for g in first.groups] == [3] * 4 and [len(g.samples) for g in second.groups] == [1] * 2
    assert [s.sample.sample_index for s in first.groups[0].samples] == [0, 1, 2]
    means = [np.mean([s.reward for s in g.samples]) for g in first.groups]
    assert first.avg_at_k.mean == pytest.approx(np.mean(means))
    assert first.pass_at(3).mean == np.mean([max(s.reward or 0 for s in g.samples) for g in first.groups])
    assert first.pass_at(1).mean == pytest.approx(first.avg_at_k.mean)
    assert first.num_tokens == sum(len(s.sample.token_ids) for s in first.samples)


def test_what_an_environment_wrote_is_not_counted(engine: Engine, quickstart_config: MakeConfig) -> None:
    [evaluation] = run(engine, quickstart_config("eval.limit=1"))
    [sample] = evaluation.samples
    length = len(sample.sample.token_ids)
    assert evaluation.num_tokens == length > 3
    sample.drawn = np.arange(length) >= 3
    assert evaluation.num_tokens == length - 3 and evaluation.lengths.tolist() == [length - 3]


def test_the_same_weights_answer_the_same(engine: Engine, quickstart_config: MakeConfig) -> None:
    """Two evaluations differ by the weights alone; another seed draws other samples."""
    config = quickstart_config("eval.limit=3")
    texts = [[s.sample.text for one in run(engine, c) for s in one.samples] for c in (config, config)]
    assert texts[0] == texts[1]
    others = run(engine, quickstart_config("eval.limit=3", "eval.seed=5"))
    assert texts[0] != [s.sample.text for one in others for s in one.samples]


def test_sampling_is_its_own(quickstart_config: MakeConfig) -> None:
    settings = ["eval.temperature=0.6", "eval.top_p=0.9", "eval.top_k=20", "eval.max_response_tokens=300"]
    config = quickstart_config(*settings)
    params = eval_params(config, n=2, seed=7)
    assert params == SamplingParams(n=2, temperature=0.6, top_p=0.9, top_k=20, max_tokens=300, seed=7)
    assert config.max_model_tokens == config.rollout.max_prompt_tokens + 300, "the engines have room for it"


def test_evaluation_goes_ahead_of_training_that_waits(engine: Engine, quickstart_config: MakeConfig) -> None:
    """Both are in the queue before the engine makes a step, training first; evaluation is done before the last of
    training begins."""
    config = quickstart_config("eval.limit=4")
    sets = load_eval_sets(config, load_encoder(config))
    [one] = sets
    params = SamplingParams(n=4, max_tokens=20, ignore_eos=True, seed=1)

    async def train(service: RolloutService, number: int) -> list[RolloutSample]:
        samples: list[RolloutSample] = []
        async with aclosing(service.generate(f"train/{number}", one.prompts[0].token_ids, params)) as arrivals:
            async for arrived in arrivals:
                samples += arrived
        return samples

    async def main() -> tuple[list[Evaluation], list[RolloutSample]]:
        service = await _service(engine)
        scorer = await Scorer.start(RewardSection(), verifiers=["gsm8k"])
        try:
            engine.worker.pause()
            training = [asyncio.create_task(train(service, i)) for i in range(NUM_TRAINING)]
            await until_queued(4 * NUM_TRAINING)
            evaluation = asyncio.create_task(evaluate(sets, config=config, service=service, scorer=scorer, version=0))
            await until_queued(4 * NUM_TRAINING + 4)
            engine.worker.resume()
            evaluations = await evaluation
            trained = [sample for samples in await asyncio.gather(*training) for sample in samples]
            return evaluations, trained
        finally:
            await service.close()
            await scorer.close()

    async def until_queued(count: int) -> None:
        async with asyncio.timeout(30):
            while (await engine.call("drain", 0.0, timeout=10)).queued < count:
                await asyncio.sleep(0.01)

    [evaluation], trained = asyncio.run(main())
    assert max(s.sample.t_finished for s in evaluation.samples) < max(sample.t_first_token for sample in trained)
    assert len(trained) == 4 * NUM_TRAINING


def test_a_version_that_changed_is_an_error(engine: Engine, quickstart_config: MakeConfig) -> None:
    with pytest.raises(SyncError, match=r"version 3 met tokens of version \[0\]"):
        run(engine, quickstart_config("eval.limit=1"), version=3)


def test_two_sets_of_one_name_are_refused(quickstart_config: MakeConfig) -> None:
    path = quickstart_config().eval.data[0].path
    config = quickstart_config(f'eval.data=["{path}", "{path}"]')
    with pytest.raises(ConfigError, match="two sets called 'held_out'; give each a `name`"):
        load_eval_sets(config, load_encoder(config))


def test_samples_without_a_score_are_left_out_and_counted(engine: Engine, quickstart_config: MakeConfig) -> None:
    [evaluation] = run(engine, quickstart_config("eval.limit=2", "eval.samples_per_prompt=2"))
    first, second = evaluation.groups

    def judged(group: Group, *rewards: float | None) -> Group:
        samples = [
            ScoredSample(sample=s.sample, reward=r, verdict="timeout" if r is None else "scored")
            for s, r in zip(group.samples, rewards, strict=True)
        ]
        return Group(prompt=group.prompt, order=0, admitted_version=0, seed=0, t_admitted=0.0, samples=samples)

    one = EvalSet(name="a", prompts=evaluation.set.prompts, samples_per_prompt=2)
    of = Evaluation(set=one, version=0, groups=(judged(first, 1.0, 0.0), judged(second, 1.0, None)))
    assert (of.avg_at_k.mean, of.num_unscored) == (0.75, 1)
    assert of.pass_at(1).mean == 0.75 and of.pass_at(2).mean == 1.0, "of the second prompt two samples are not known"
