"""Episodes against a real engine, with environments in real processes."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmorl.config.data_sections import RewardSection
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import OBSERVED, RolloutSample, SamplingParams
from olmorl.contract.training import ScoreRequest
from olmorl.controller.compose import Inputs
from olmorl.controller.group import ScoredSample
from olmorl.controller.rollout import RolloutService
from olmorl.controller.sampling import sample_prompt
from olmorl.controller.scoring import Scorer
from olmorl.data.prompt import Check, Prompt

PARAMS = SamplingParams(n=4, max_tokens=60, seed=3)

MODULE = """
import itertools, os, random, time
from olmorl.environments import Reply

class Hanging:
    def __init__(self, *, prompt, ground_truth, seed): pass
    def step(self, completion):
        while True: pass

class Deadly(Hanging):
    def step(self, completion): os._exit(1)

class Failing(Hanging):
    def step(self, completion): raise RuntimeError("the oven is cold")

class Careless(Hanging):
    def step(self, completion): return "21;"

class Chatty(Hanging):
    max_turns = 3
    def step(self, completion): return Reply("1;" * 100)

class Guess:
    "Says how often it was asked, and a secret that hangs on the seed."
    stop = ("=", ";")
    max_turns = 3
    def __init__(self, *, prompt, ground_truth, seed):
        self.asked, self.secret = 0, random.Random(seed).randint(1, 9)
    def step(self, completion):
        self.asked += 1
        return Reply(f"{self.asked}{self.secret};", reward=0.25)

class NoStep:
    pass
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rooms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def ask(inputs: Inputs, environment: str, text: str = "7+5+3=", truth: str = "15") -> Prompt:
    ids = np.array(inputs.tokenizer(text)["input_ids"], np.int32)
    return Prompt(
        index=0,
        token_ids=ids,
        text=text,
        checks=(Check("gsm8k", truth),),
        data_source="s",
        environment=environment,
        epoch=0,
        position=0,
    )


Scenario = Callable[[RolloutService, Scorer], Awaitable[None]]


def playing(inputs: Inputs, environment: str, workers: list[Any], scenario: Scenario, **options: float) -> None:
    async def main() -> None:
        scorer = await Scorer.start(
            RewardSection(**options), verifiers=["gsm8k"], environments=[environment], tokenizer=inputs.tokenizer
        )
        service = RolloutService(on_lost=lambda name, reason: service.remove_worker(name))
        for worker in workers:
            service.ensure_worker(worker)
        try:
            async with asyncio.timeout(60):
                await scenario(service, scorer)
        finally:
            await service.close()
            await scorer.close()

    asyncio.run(main())


async def play(
    service: RolloutService,
    scorer: Scorer,
    prompt: Prompt,
    *,
    received: Callable[[Any], None] = lambda samples: None,
    params: SamplingParams = PARAMS,
) -> list[ScoredSample]:
    scored: list[ScoredSample] = []
    await sample_prompt(
        prompt,
        request_id="r",
        params=params,
        service=service,
        scorer=scorer,
        deliver=scored.extend,
        received=received,
    )
    return sorted(scored, key=lambda s: s.sample.sample_index)


def test_a_calculator_answers_and_every_token_is_what_engine_and_model_saw(inputs: Inputs, engine: Any) -> None:
    async def scenario(service: RolloutService, scorer: Scorer) -> None:
        arrived: list[RolloutSample] = []
        prompt = ask(inputs, "calculator")
        scored = await play(service, scorer, prompt, received=arrived.extend)
        assert [s.sample.sample_index for s in scored] == [0, 1, 2, 3]
        assert service.tokens_received == sum(s.num_drawn for s in scored) == sum(len(s.token_ids) for s in arrived)
        assert service.in_flight == [] and service.undelivered_tokens == 0
        assert any(not s.loss_mask.all() for s in scored), "nobody used the calculator"
        for s in scored:
            sample, drawn = s.sample, s.loss_mask
            assert sample.text == inputs.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            for left, right in re.findall(r"(?<!\d)(\d{1,9}(?:\+\d{1,9})+)=(\d+);", sample.text):
                assert sum(map(int, left.split("+"))) == int(right), "the calculator was not asked"
            assert sample.version_spans[0][0] == 0
            marks = np.concatenate([np.full(end - start, version) for version, start, end in sample.version_spans])
            assert (marks == np.where(drawn, 0, OBSERVED)).all()
            # The engine, given the whole episode as one sequence, finds each drawn token's recorded logprob again.
            whole = np.concatenate([prompt.token_ids, sample.token_ids])
            (again,) = await engine.call("score", ScoreRequest(sequences=(whole,)), timeout=30)
            recorded = sample.raw_logprobs[drawn]
            assert np.abs(again[len(prompt.token_ids) - 1 :][drawn] - recorded).max() < 1e-4
        stats = await engine.call("drain", 0.0, timeout=10)
        assert stats.stats["prefix_hits"] > 0, "a later turn computed the earlier ones again"

    playing(inputs, "calculator", [engine], scenario)


def test_after_the_loss_of_a_worker_done_turns_stay_and_the_rest_is_as_it_would_have_been(
    inputs: Inputs, start_engine: Callable[[str], Any]
) -> None:
    first, second = start_engine("a"), start_engine("b")
    prompt = ask(inputs, "calculator")
    expected: list[ScoredSample] = []
    turns: list[RolloutSample] = []

    async def undisturbed(service: RolloutService, scorer: Scorer) -> None:
        expected.extend(await play(service, scorer, prompt))

    async def disturbed(service: RolloutService, scorer: Scorer) -> None:
        def received(samples: list[RolloutSample]) -> None:
            turns.extend(samples)
            if len(turns) == 5 and service.stats.keys() == {"a"}:  # all first turns are in, and a second one
                service.ensure_worker(second)
                service.remove_worker("a")

        scored = await play(service, scorer, prompt, received=received)
        assert [s.sample.token_ids.tolist() for s in scored] == [s.sample.token_ids.tolist() for s in expected]
        assert {turn.worker for turn in turns} == {"a", "b"}
        assert service.tokens_received == sum(s.num_drawn for s in scored), "a turn was drawn twice"

    playing(inputs, "calculator", [second], undisturbed)
    playing(inputs, "calculator", [first], disturbed)


@pytest.mark.usefixtures("modules")
def test_turns_end_rewards_add_up_and_a_group_shares_the_seed(inputs: Inputs, engine: Any) -> None:
    async def scenario(service: RolloutService, scorer: Scorer) -> None:
        prompt = ask(inputs, "my_rooms:Guess")
        scored = await play(service, scorer, prompt)
        for s in scored:
            assert s.reward is not None and s.sample.finish_reason == "stop"
            assert s.reward % 1 == 0.75, "three turns at 0.25, and gsm8k's 0 or 1 for the last of them"
            observed = inputs.tokenizer.decode(s.sample.token_ids[~s.loss_mask])
            assert observed[0] == "1" and observed[3] == "2" and observed[1] == observed[4], "no secret kept"
        assert len({inputs.tokenizer.decode(s.sample.token_ids[~s.loss_mask]) for s in scored}) == 1

    playing(inputs, "my_rooms:Guess", [engine], scenario)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("name", "verdict", "detail"),
    [
        ("Hanging", "timeout", "not judged within 0.5 s"),
        ("Deadly", "error", "exited with code 1"),
        ("Failing", "error", "RuntimeError: the oven is cold"),
        ("Careless", "error", "must be a Reply"),
    ],
)
def test_an_environment_that_fails_costs_its_samples(
    inputs: Inputs, engine: Any, name: str, verdict: str, detail: str
) -> None:
    """And never blocks the event loop, whatever it does."""

    async def scenario(service: RolloutService, scorer: Scorer) -> None:
        async def watch() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - before)

        watcher = asyncio.create_task(watch())
        params = SamplingParams(n=2, max_tokens=60, seed=3)
        scored = await play(service, scorer, ask(inputs, f"my_rooms:{name}"), params=params)
        watcher.cancel()
        for s in scored:
            assert (s.verdict, s.reward) == (verdict, None) and detail in s.detail, s.detail
            assert s.num_drawn == len(s.sample.token_ids) > 0
        if name == "Hanging":
            assert sorted(gaps)[len(gaps) // 2] < 0.2

    gaps: list[float] = []
    playing(inputs, f"my_rooms:{name}", [engine], scenario, timeout_seconds=0.5 if name == "Hanging" else 30.0)


@pytest.mark.usefixtures("modules")
def test_an_observation_that_leaves_no_room_ends_the_sample_as_too_long(inputs: Inputs, engine: Any) -> None:
    async def scenario(service: RolloutService, scorer: Scorer) -> None:
        for s in await play(service, scorer, ask(inputs, "my_rooms:Chatty")):
            assert s.sample.finish_reason == "length" and s.loss_mask.all() and s.verdict == "scored"

    playing(inputs, "my_rooms:Chatty", [engine], scenario)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("calculater", "did you mean 'calculator'"),
        ("my_rooms:Guest", "did you mean 'Guess'"),
        ("no_rooms:Guess", "no module 'no_rooms'"),
        ("my_rooms:NoStep", "which cannot be called"),
        ("olmorl.rewards.gsm8k:gsm8k", "'olmorl.rewards.gsm8k:gsm8k' cannot be played: not an environment"),
    ],
)
def test_a_wrong_name_is_said_at_the_start(inputs: Inputs, name: str, says: str) -> None:
    async def never(service: RolloutService, scorer: Scorer) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=says):
        playing(inputs, name, [], never)
