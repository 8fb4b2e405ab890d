"""The loops against a real engine and real verifiers: batches with signal come, every token is accounted for."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from olmorl.config.schema import Config
from olmorl.contract.errors import DataError, StarvationError, SyncError, WorkerError
from olmorl.controller.background import Background
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.compose import Inputs, load_inputs
from olmorl.controller.evaluate import evaluate
from olmorl.controller.group import Fate, Group, State
from olmorl.controller.loop import Batch, RolloutLoops, request_seed
from olmorl.controller.resume import PromptQueue
from olmorl.controller.rollout import RolloutService
from olmorl.controller.scoring import Scorer
from olmorl.data.prompt import Prompt
from olmorl.data.selection import PromptSelection
from olmorl.data.stream import PromptStream

MakeConfig = Callable[..., Config]


class Driver:
    """What a session is made of, without learners."""

    def __init__(self, config: Config, inputs: Inputs, service: RolloutService, scorer: Scorer) -> None:
        self.config, self.inputs, self.service, self.scorer = config, inputs, service, scorer
        self.dropped: list[Group] = []
        self.buffer = RolloutBuffer(
            groups_per_batch=config.rollout.prompts_per_step * (config.rollout.oversampling or 1),
            async_steps=config.rollout.async_steps,
            window=config.rollout.staleness_window,
            max_overtaken=0 if config.rollout.oversampling else config.rollout.max_overtaken,
        )
        rules = config.rollout
        self.selection = PromptSelection(
            PromptStream(inputs.train, seed=config.run.seed, shuffle=config.data.shuffle),
            num_rows=len(inputs.train),
            retire_pass_rate=rules.no_resampling_pass_rate,
            rest_steps=rules.rest_steps,
        )
        self.loops = RolloutLoops(
            config=config,
            buffer=self.buffer,
            prompts=PromptQueue(self.selection),
            service=service,
            scorer=scorer,
            version=0,
            on_dropped=self.dropped.append,
            selection=self.selection,
        )
        self.background = Background()


def drive(config: Config, inputs: Inputs, engine: Any, scenario: Callable[[Driver], Awaitable[None]]) -> None:
    async def main() -> None:
        scorer = await Scorer.start(
            config.reward, verifiers=inputs.verifiers, environments=inputs.environments, tokenizer=inputs.tokenizer
        )
        lost = asyncio.get_running_loop().create_future()
        service = RolloutService(on_lost=lambda name, reason: lost.set_exception(AssertionError(f"{name}: {reason}")))
        service.ensure_worker(engine)
        driver = Driver(config, inputs, service, scorer)
        driver.background.start_loop("no worker is lost", _until(lost))
        driver.background.start_loop("service", service.run())
        try:
            async with asyncio.timeout(60):
                await scenario(driver)
        finally:
            await driver.background.close()
            await service.close()
            await scorer.close()

    asyncio.run(main())


async def _until(lost: "asyncio.Future[None]") -> None:
    await lost


def test_batches_come_and_every_received_token_is_somewhere(
    quickstart_config: MakeConfig, inputs: Inputs, engine: Any
) -> None:
    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        trained: list[Group] = []
        for version in range(4):
            batch = await driver.background.unless_failed(driver.loops.next_batch())
            assert batch.version == version and len(batch.groups) == 2
            for group in batch.groups:
                assert {s.fate for s in group.samples} == {Fate.TRAINED}
                assert [s.sample.sample_index for s in group.samples] == [0, 1, 2, 3]
                assert len({s.reward for s in group.samples}) > 1, "a group without signal is in the batch"
                assert group.seed == request_seed(0, group.prompt)
            driver.loops.trained(batch)
            driver.loops.published(version + 1)
            trained += batch.groups
        await driver.background.stop_loop("rollouts")
        open_groups = driver.buffer.outstanding()
        received = driver.service.undelivered_tokens + sum(
            g.tokens_received for g in [*trained, *driver.dropped, *open_groups]
        )
        assert received == driver.service.tokens_received
        positions = [g.prompt.position for g in [*trained, *driver.dropped, *open_groups]]
        assert sorted(positions) == list(range(len(positions))), "an occurrence is in two places, or in none"
        assert all(s.fate is Fate.ZERO_VARIANCE for g in driver.dropped for s in g.samples)
        assert driver.service.in_flight == [], "a lease outlived its loop"

    drive(quickstart_config(), inputs, engine, scenario)


def test_without_active_sampling_the_oldest_groups_are_trained_as_they_are(
    quickstart_config: MakeConfig, inputs: Inputs, engine: Any
) -> None:
    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        positions: list[int] = []
        for version in range(3):
            batch = await driver.background.unless_failed(driver.loops.next_batch())
            positions += [group.prompt.position for group in batch.groups]
            driver.loops.trained(batch)
            driver.loops.published(version + 1)
        assert sorted(positions) == list(range(6)) and not driver.dropped

    config = quickstart_config("rollout.active_sampling=false", "rollout.async_steps=0")
    drive(config, inputs, engine, scenario)


def test_a_synchronous_run_admits_nothing_before_the_update_is_live(
    quickstart_config: MakeConfig, inputs: Inputs, engine: Any
) -> None:
    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        batch = await driver.background.unless_failed(driver.loops.next_batch())
        driver.loops.trained(batch)
        await asyncio.sleep(0)
        assert {group.state for group in driver.buffer.groups} == {State.TRAINED}
        driver.loops.published(1)
        second = await driver.background.unless_failed(driver.loops.next_batch())
        assert all(group.admitted_version == 1 for group in second.groups)

    config = quickstart_config("rollout.active_sampling=false", "rollout.async_steps=0")
    drive(config, inputs, engine, scenario)


def test_a_verifier_that_fails_costs_samples_and_not_the_run(
    quickstart_config: MakeConfig, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
from itertools import count
calls = count()
def judge(completion, truth, prompt):
    return 1 / (next(calls) % 4)  # fails once in four
"""
    (tmp_path / "half_broken.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        batch = await driver.background.unless_failed(driver.loops.next_batch())
        samples = [s for group in batch.groups for s in group.samples]
        assert {s.fate for s in samples if s.reward is None} == {Fate.ERROR}
        assert any("ZeroDivisionError" in s.detail for s in samples)

    config = quickstart_config("reward.verifier=half_broken:judge", "rollout.active_sampling=false")
    drive(config, load_inputs(config), engine, scenario)


@pytest.mark.parametrize(("judged_before", "ends"), [(0, True), (1, False)])
def test_a_verifier_that_fails_from_the_start_ends_the_run(
    quickstart_config: MakeConfig,
    engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    judged_before: int,
    ends: bool,
) -> None:
    """At once; one that has judged a single sample is given the patience for starving runs."""
    source = f"""
from itertools import count
calls = count()
def judge(completion, truth, prompt):
    if completion and next(calls) >= {judged_before}:
        raise OSError("the judge is down")
    return 1.0
"""
    (tmp_path / f"fails_after_{judged_before}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    says = "first 8 groups of data source 'chain_sums' ended in an error" if ends else "no batch of 2 groups"

    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        with pytest.raises(StarvationError, match=says) as caught:
            await driver.background.unless_failed(driver.loops.next_batch())
        assert f"OSError: the judge is down ({tmp_path}/fails_after_{judged_before}.py:6)" in str(caught.value)
        assert (8 <= len(driver.dropped) < 16) if ends else len(driver.dropped) >= 16

    config = quickstart_config(f"reward.verifier=fails_after_{judged_before}:judge", "rollout.starvation_patience=8")
    drive(config, load_inputs(config), engine, scenario)


RIGHT, WRONG = "", "(?!)"  # regular expressions that every answer, or none, satisfies
FLIP = """
from collections import Counter
asked = Counter()
def judge(completion, truth, prompt):
    asked[prompt] += 1
    return asked[prompt] % 2  # so the samples of a group never agree
"""


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a data file of so many rows that carry signal for certain, are always right, always wrong."""
    (tmp_path / "flip.py").write_text(FLIP)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*, signal: int, right: int, wrong: int) -> str:
        rows = [
            {"prompt": f"{i % 9 + 1}+{i // 9 + 1}+3=", "answer": "", "verifier": "flip:judge"} for i in range(signal)
        ]
        rows += [{"prompt": f"{i % 9 + 1}+1=", "answer": RIGHT, "verifier": "regex"} for i in range(right)]
        rows += [{"prompt": f"{i % 9 + 1}+2=", "answer": WRONG, "verifier": "regex"} for i in range(wrong)]
        file = tmp_path / "mixed.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"data.train={file}"

    return write


OWN = ("reward.verifier=none", "eval.data=[]")  # the rows name their verifiers


def train(driver: Driver, batch: Batch) -> None:
    driver.loops.trained(batch)
    driver.loops.published(batch.version + 1)


@pytest.mark.parametrize("max_overtaken", [None, 0])
def test_every_batch_is_full_of_signal_where_nine_tenths_carry_none(
    quickstart_config: MakeConfig, engine: Any, mixed: Callable[..., str], max_overtaken: int | None
) -> None:
    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        orders: list[int] = []
        for _ in range(4):
            batch = await driver.background.unless_failed(driver.loops.next_batch())
            assert len(batch.groups) == 2 and all(group.has_signal for group in batch.groups)
            orders += [group.order for group in batch.groups]
            train(driver, batch)
        assert len(driver.dropped) > 20
        assert {s.fate for group in driver.dropped for s in group.samples} == {Fate.ZERO_VARIANCE}
        if max_overtaken == 0:
            assert orders == sorted(orders), "not in the order of admission"

    config = quickstart_config(*OWN, mixed(signal=10, right=45, wrong=45), f"rollout.max_overtaken={max_overtaken}")
    drive(config, load_inputs(config), engine, scenario)


def test_fixed_oversampling_trains_what_its_draw_happens_to_hold(
    quickstart_config: MakeConfig, engine: Any, mixed: Callable[..., str]
) -> None:
    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        trained: list[Group] = []
        sizes = []
        for version in range(3):
            batch = await driver.background.unless_failed(driver.loops.next_batch())
            assert batch.version == version and all(group.has_signal for group in batch.groups)
            sizes.append(len(batch.groups))
            trained += batch.groups
            train(driver, batch)
        assert sizes == [2, 1, 2], "rows of the rounds that carry signal: 6, 1, none, 6; at most 2 are trained"
        fates = {group.order: {s.fate for s in group.samples} for group in [*trained, *driver.dropped]}
        assert [fates[order] for order in range(6)] == 2 * [{Fate.TRAINED}] + 4 * [{Fate.SURPLUS}]
        assert [fates[order] for order in range(6, 18)] == [{Fate.TRAINED}] + 11 * [{Fate.ZERO_VARIANCE}]

    config = quickstart_config(
        *OWN,
        mixed(signal=7, right=5, wrong=6),
        "data.shuffle=false",
        "rollout.active_sampling=false",
        "rollout.oversampling=3",
    )
    drive(config, load_inputs(config), engine, scenario)


def test_fixed_oversampling_does_not_stand_still_while_updates_lag(
    quickstart_config: MakeConfig, engine: Any, mixed: Callable[..., str]
) -> None:
    """A draw's surplus gives its slots back with its batch, not before: else the engine draws ahead more groups at one
    version than the window lets be trained."""

    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        waiting: list[Batch] = []
        for _ in range(8):
            waiting.append(await driver.background.unless_failed(driver.loops.next_batch()))
            driver.loops.trained(waiting[-1])
            if len(waiting) == 3:
                driver.loops.published(waiting.pop(0).version + 1)

    config = quickstart_config(
        *OWN, mixed(signal=2, right=0, wrong=4), "rollout.active_sampling=false", "rollout.oversampling=3"
    )
    drive(config, load_inputs(config), engine, scenario)


@pytest.mark.parametrize(("policy", "trained"), [("train_partial", [1]), ("stop", [])])
def test_a_starved_run_stops_or_trains_what_there_is(
    quickstart_config: MakeConfig,
    engine: Any,
    mixed: Callable[..., str],
    policy: str,
    trained: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row of twenty carries signal, and a batch is two: after sixteen groups the patience ends."""
    monkeypatch.setattr("olmorl.controller.starvation.LONGEST_PAUSE_SECONDS", 0.25)

    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        with pytest.raises(StarvationError) as caught:
            while True:
                batch = await driver.background.unless_failed(driver.loops.next_batch())
                sizes.append(len(batch.groups))
                train(driver, batch)
        assert "no batch of 2 groups with signal can be filled: of the last 1" in str(caught.value)
        assert "all wrong" in str(caught.value) and "(without signal: mixed 1" in str(caught.value)
        with pytest.raises(StarvationError):  # and it stays so
            await driver.loops.next_batch()
        assert not driver.service.in_flight

    sizes: list[int] = []
    config = quickstart_config(
        *OWN,
        mixed(signal=1, right=0, wrong=19),
        "data.shuffle=false",
        "rollout.async_steps=0",
        "rollout.no_resampling_pass_rate=0.01",
        "rollout.starvation_patience=8",
        f"rollout.on_starvation={policy}",
    )
    drive(config, load_inputs(config), engine, scenario)
    assert sizes == trained


def test_a_run_whose_prompts_are_all_solved_says_so(
    quickstart_config: MakeConfig, engine: Any, mixed: Callable[..., str]
) -> None:
    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        with pytest.raises(StarvationError, match=r"every prompt has passed at a rate of 1 or above and is retired"):
            await driver.background.unless_failed(driver.loops.next_batch())
        assert driver.selection.num_retired == 3

    config = quickstart_config(*OWN, mixed(signal=0, right=3, wrong=0), "rollout.no_resampling_pass_rate=1.0")
    drive(config, load_inputs(config), engine, scenario)


def test_the_last_prompt_may_be_solved_while_admission_pauses(
    quickstart_config: MakeConfig, engine: Any, mixed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olmorl.controller.starvation.FIRST_PAUSE_SECONDS", 0.1)

    async def scenario(driver: Driver) -> None:
        feeding = asyncio.create_task(driver.loops.feed())
        while driver.buffer.has_free_slot():
            await asyncio.sleep(0)
        for group in driver.buffer.groups:  # all end, and nothing comes of them
            driver.buffer.claim()
            driver.loops._starvation.offered(group)
            driver.buffer.finish(group)
            driver.buffer.drop(group)
        driver.loops._changed.notify()
        await asyncio.sleep(0)
        for position in range(6):
            driver.selection.record(driver.selection.prompt_at(0, position), pass_rate=1.0, has_signal=False)
        assert not driver.selection.has_next
        done, _ = await asyncio.wait({feeding}, timeout=1.0)
        assert not done and len(driver.buffer) == 0
        feeding.cancel()

    config = quickstart_config(
        *OWN,
        mixed(signal=0, right=6, wrong=0),
        "rollout.async_steps=0",
        "rollout.no_resampling_pass_rate=1.0",
        "rollout.starvation_patience=2",
    )
    drive(config, load_inputs(config), engine, scenario)


def test_a_judge_that_stays_down_ends_the_run_if_that_is_wished(
    quickstart_config: MakeConfig, inputs: Inputs, engine: Any
) -> None:
    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        with pytest.raises(StarvationError, match=r"no verdicts for \d+ s, reward.outage_seconds is 0.1: Connect"):
            await driver.background.unless_failed(driver.loops.next_batch())
        assert all(s.verdict == "timeout" for group in driver.dropped for s in group.samples)

    with socket.socket() as nobody:  # bound, and never listening
        nobody.bind(("127.0.0.1", 0))
        config = quickstart_config(
            "reward.verifier=judge",
            f"reward.judge_url=http://127.0.0.1:{nobody.getsockname()[1]}/v1",
            "reward.judge_model=m",
            "reward.timeout_seconds=1.0",
            "reward.outage_seconds=0.1",
        )
        drive(config, load_inputs(config), engine, scenario)


class Unreadable:
    has_next = True

    def __next__(self) -> Prompt:
        raise DataError("line 7 is not JSON")


def test_a_failure_of_the_producers_ends_the_wait_for_a_batch(
    quickstart_config: MakeConfig, inputs: Inputs, engine: Any
) -> None:
    """A verdict that cannot come, a prompt that cannot be read: told at once, and not a batch that never fills."""

    async def verifiers_gone(driver: Driver) -> None:
        await driver.scorer.close()
        driver.background.start_loop("rollouts", driver.loops.run())
        with pytest.raises(WorkerError, match="the verifier pool is closed"):
            await driver.background.unless_failed(driver.loops.next_batch())

    async def no_more_prompts(driver: Driver) -> None:
        driver.loops._prompts = Unreadable()
        driver.background.start_loop("rollouts", driver.loops.run())
        with pytest.raises(DataError, match="line 7 is not JSON"):
            await driver.background.unless_failed(driver.loops.next_batch())

    drive(quickstart_config(), inputs, engine, verifiers_gone)
    drive(quickstart_config(), inputs, engine, no_more_prompts)


def test_signal_may_be_rare(
    quickstart_config: MakeConfig, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine groups of ten are all wrong: they are replaced until the batch is full, however many that takes."""
    source = """
from itertools import count
calls = count()
def judge(completion, truth, prompt):
    number = next(calls)
    return number % 40 == 0
"""
    (tmp_path / "mostly_wrong.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario(driver: Driver) -> None:
        driver.background.start_loop("rollouts", driver.loops.run())
        for version in range(2):
            batch = await driver.background.unless_failed(driver.loops.next_batch())
            driver.loops.trained(batch)
            driver.loops.published(version + 1)
        assert len(driver.dropped) > 20

    config = quickstart_config("reward.verifier=mostly_wrong:judge", "rollout.async_steps=0")
    drive(config, load_inputs(config), engine, scenario)


def test_evaluation_is_reproducible_and_of_one_version(quickstart_config: MakeConfig, engine: Any) -> None:
    config = quickstart_config("eval.samples_per_prompt=2")
    inputs = load_inputs(config)

    async def scenario(driver: Driver) -> None:
        async def measure(version: int) -> Any:
            [evaluation] = await evaluate(
                inputs.eval, config=driver.config, service=driver.service, scorer=driver.scorer, version=version
            )
            return evaluation

        alone = await driver.background.unless_failed(measure(0))
        driver.background.start_loop("rollouts", driver.loops.run())
        in_company = await driver.background.unless_failed(measure(0))
        assert (alone.avg_at_k, alone.num_tokens) == (in_company.avg_at_k, in_company.num_tokens)
        assert (len(alone.groups), alone.k, alone.num_unscored) == (4, 2, 0)
        assert alone.avg_at_k.mean <= alone.pass_at(2).mean
        with pytest.raises(SyncError, match=r"evaluation of version 1 met tokens of version \[0\]"):
            await driver.background.unless_failed(measure(1))

    drive(config, inputs, engine, scenario)
