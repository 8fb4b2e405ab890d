"""A checkpoint's driver state brings back every prompt without a fate, once, and then the stream where it stood."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import RolloutSample
from olmorl.controller.admission import judge, train_samples
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.compose import Inputs, load_inputs, read_beginning
from olmorl.controller.group import Fate, Group, ScoredSample
from olmorl.controller.loop import request_seed
from olmorl.controller.recorder import Totals
from olmorl.controller.resume import DriverState, PromptQueue
from olmorl.controller.run import Run
from olmorl.controller.run_directory import RunDirectory
from olmorl.controller.session import Session
from olmorl.data.prompt import Prompt
from olmorl.data.stream import PromptStream

MakeConfig = Callable[..., Config]


def stream_of(inputs: Inputs) -> PromptStream:
    return PromptStream(inputs.train, seed=5)


def capture(config: Config, queue: PromptQueue, buffer: RolloutBuffer, *, step: int = 1, **totals: Any) -> DriverState:
    return DriverState.capture(
        step=step, attempt=1, prompts=queue, buffer=buffer, totals=Totals(**totals), config=config
    )


@pytest.fixture
def config(quickstart_config: MakeConfig) -> Config:
    return quickstart_config("run.seed=5")


def generated(prompt: Prompt, index: int) -> RolloutSample:
    """Every field filled with something that is its own."""
    random = np.random.default_rng([prompt.position, index])
    length = int(random.integers(1, 6))
    return RolloutSample(
        request_id=prompt.prompt_id,
        lease=0,
        sample_index=index,
        worker="inference-1",
        token_ids=random.integers(0, 99, length).astype(np.int32),
        logprobs=random.normal(size=length).astype(np.float32),
        raw_logprobs=random.normal(size=length).astype(np.float32),
        version_spans=((0, 0, length - 1), (1, length - 1, length)),
        text=f"{prompt.position}/{index}",
        finish_reason="stop" if index else "length",
        kv_events=((0, 0, "prefill"), (3, 1, "swap")),
        t_first_token=1.25 + index,
        t_finished=2.5 + index,
    )


def finish(buffer: RolloutBuffer, group: Group) -> None:
    """Its samples arrive, one of them without a verdict."""
    for index in range(4):
        sample = generated(group.prompt, index)
        verdict = {"reward": None, "verdict": "timeout"} if index == 3 else {"reward": index / 2, "verdict": "scored"}
        group.samples.append(ScoredSample(sample=sample, **verdict))
        group.tokens_received += len(sample.token_ids)
    buffer.finish(group)
    group.has_signal = judge(group, scale=1.0, kind="centered", mask_truncated=True)
    assert group.has_signal


def assert_same(a: Any, b: Any) -> None:
    """Field by field, arrays too."""
    assert type(a) is type(b)
    for field in fields(a):
        if field.name in ("order", "detail"):  # its place in the new attempt's order; told when it happened
            continue
        if field.name == "advantage" and isinstance(a, ScoredSample) and a.fate is not Fate.TRAINED:  # of no use
            continue
        ours, theirs = getattr(a, field.name), getattr(b, field.name)
        if isinstance(ours, list):
            assert len(ours) == len(theirs)
            for x, y in zip(ours, theirs, strict=True):
                assert_same(x, y)
        elif isinstance(ours, RolloutSample):
            assert_same(ours, theirs)
        elif isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        elif isinstance(ours, Prompt):
            assert (ours.epoch, ours.position, ours.index) == (theirs.epoch, theirs.position, theirs.index)
        else:
            assert ours == theirs, field.name


def test_finished_groups_come_back_as_they_were(tmp_path: Path, inputs: Inputs, config: Config) -> None:
    queue = PromptQueue(stream_of(inputs))
    buffer = RolloutBuffer(groups_per_batch=1, async_steps=3, window=6)
    groups = [buffer.admit(next(queue), version=v, seed=7 + v, now=0.5 * v) for v in range(4)]
    while buffer.claim():
        pass
    for group in (groups[2], groups[0]):
        finish(buffer, group)
    assert buffer.take_batch(3) == [groups[0]], "a group on its way to the learner is not trained yet"
    state = capture(config, queue, buffer, step=3, tokens=12, reward_first=0.5)
    state.save(tmp_path)

    loaded = DriverState.load(tmp_path, config=config)
    stream = stream_of(inputs)
    again = loaded.prompts(stream)
    assert [p.position for p in again.again] == [1, 3] and again.state()["position"] == 4
    assert loaded.totals == state.totals
    restored = loaded.groups(stream)
    assert [g.prompt.position for g in restored] == [0, 2]
    new = RolloutBuffer(groups_per_batch=1, async_steps=3, window=6)
    new.restore(restored, version=3)
    taken = new.take_batch(3)
    assert taken == [restored[0]]
    for group, before in zip(restored, (groups[0], groups[2]), strict=True):
        group.state = before.state  # one was taken, the other may be
        assert_same(group, before)
        for ours, theirs in zip(train_samples(group), train_samples(before), strict=True):
            assert_same(ours, theirs)


def test_another_seed_is_refused(tmp_path: Path, inputs: Inputs, quickstart_config: MakeConfig, config: Config) -> None:
    queue = PromptQueue(stream_of(inputs))
    buffer = RolloutBuffer(groups_per_batch=1, async_steps=2, window=4)
    capture(config, queue, buffer).save(tmp_path)
    with pytest.raises(ConfigError, match=r"run.seed = 5, the config says 6; keep the seed"):
        DriverState.load(tmp_path, config=quickstart_config("run.seed=6"))


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    tmp_path: Path, inputs: Inputs, quickstart_config: MakeConfig, config: Config
) -> None:
    """Its config, its summary, and the rows beyond its checkpoint, which another resume would set aside."""
    directory = RunDirectory(tmp_path / "run")
    directory.prepare(resume=False)
    directory.checkpoint(1).mkdir()
    queue, buffer = PromptQueue(stream_of(inputs)), RolloutBuffer(groups_per_batch=1, async_steps=0, window=0)
    capture(config, queue, buffer).save(directory.checkpoint(1))
    directory.complete_checkpoint(1, keep=1)
    directory.config_file.write_text("as it ran")
    directory.summary_file.write_text("{}")
    directory.metrics_file.write_text('{"progress/step": 2}\n')
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    changed = quickstart_config("run.seed=6", "run.name=run", f"run.output_dir={tmp_path}")
    with Run(changed, resume=True) as run, pytest.raises(ConfigError, match=r"run.seed = 5, the config says 6"):
        run.start()
    (directory.path / ".lock").unlink()
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_the_driver_goes_on_while_its_state_is_written(
    tmp_path: Path, inputs: Inputs, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long responses that takes seconds, in which engines would wait for their next prompts."""
    directory, went_on, written = RunDirectory(tmp_path / "run"), threading.Event(), []
    directory.prepare(resume=False)
    directory.checkpoint(1).mkdir()
    session = SimpleNamespace(_config=config, _fleet=SimpleNamespace(learners=[]), _directory=directory)
    state = capture(config, PromptQueue(stream_of(inputs)), RolloutBuffer(groups_per_batch=1, async_steps=0, window=0))
    monkeypatch.setattr(DriverState, "save", lambda self, folder: written.append(went_on.wait(timeout=20)))

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Session._complete_checkpoint(session, 1, state))  # type: ignore[arg-type]
            await asyncio.sleep(0)  # it has begun
            went_on.set()

    asyncio.run(scenario())
    assert written == [True] and directory.newest_complete() == directory.checkpoint(1)


@pytest.mark.parametrize("file", ["driver.json", "finished.parquet"])
@pytest.mark.parametrize("left", [None, 0, 20])
def test_a_checkpoint_that_was_cut_short_is_named(
    tmp_path: Path, inputs: Inputs, config: Config, file: str, left: int | None
) -> None:
    queue = PromptQueue(stream_of(inputs))
    capture(config, queue, RolloutBuffer(groups_per_batch=1, async_steps=0, window=0)).save(tmp_path)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    if left is not None:
        (tmp_path / file).write_bytes(content[:left])
    with pytest.raises(ConfigError, match=r"is broken .* continues the checkpoint before"):
        DriverState.load(tmp_path, config=config)


@pytest.mark.parametrize("change", ["rollout.window=9", "reward.scale=2", "sampling.temperature=0.9"])
def test_groups_made_under_other_settings_are_made_anew(
    tmp_path: Path, inputs: Inputs, quickstart_config: MakeConfig, config: Config, change: str
) -> None:
    queue = PromptQueue(stream_of(inputs))
    buffer = RolloutBuffer(groups_per_batch=1, async_steps=2, window=4)
    for _ in range(3):
        buffer.admit(next(queue), version=0, seed=0, now=0.0)
    while buffer.claim():
        pass
    finish(buffer, buffer.groups[1])
    capture(config, queue, buffer).save(tmp_path)
    assert len(DriverState.load(tmp_path, config=config).finished) == 1
    changed = DriverState.load(tmp_path, config=quickstart_config("run.seed=5", change))
    assert changed.finished == [] and changed.groups(stream_of(inputs)) == []
    assert sorted(position for _, position in changed.again) == [0, 1, 2]


def test_settings_that_changed_are_told_old_and_new(
    tmp_path: Path, inputs: Inputs, quickstart_config: MakeConfig, config: Config
) -> None:
    as_it_was = quickstart_config("run.seed=5", "loss.importance_cap=inf")
    capture(as_it_was, PromptQueue(stream_of(inputs)), RolloutBuffer(groups_per_batch=1, async_steps=0, window=0)).save(
        tmp_path
    )
    state = DriverState.load(tmp_path, config=as_it_was)
    assert state.changes(as_it_was) == []
    other = quickstart_config(
        "run.seed=5", "optim.lr=0.25", "rollout.window=9", f"reward.remap={{gsm8k='{'x' * 200}'}}"
    )
    *few, long = sorted(state.changes(other), key=len)
    assert few == [
        "rollout.window: none -> 9",
        f"optim.lr: {config.optim.lr} -> 0.25",
        "loss.importance_cap: Infinity -> 2.0",
    ]
    assert long.startswith('reward.remap: {} -> {"gsm8k": "xxx') and long.endswith("xxx…") and len(long) < 150
    del state.settings["optim"], state.settings["rollout"]["window"]  # as an older version wrote it
    assert len(state.changes(other)) == 2


def test_other_data_is_refused_by_its_key_and_with_what_changed(
    tmp_path: Path, inputs: Inputs, quickstart_config: MakeConfig, config: Config
) -> None:
    capture(config, PromptQueue(stream_of(inputs)), RolloutBuffer(groups_per_batch=1, async_steps=0, window=0)).save(
        tmp_path
    )
    assert read_beginning(config, inputs, tmp_path).changes == ()
    fewer = quickstart_config("run.seed=5", f'data.train={{path = "{config.data.train[0].path}", limit = 9}}')
    with pytest.raises(
        ConfigError, match=r"what data.train gives \(rows.* changed since .*Settings that changed: data."
    ):
        read_beginning(fewer, load_inputs(fewer), tmp_path)


def test_the_state_is_of_one_instant(inputs: Inputs, config: Config) -> None:
    """What the run adds up afterwards is not in it."""
    queue, totals = PromptQueue(stream_of(inputs)), Totals()
    buffer = RolloutBuffer(groups_per_batch=1, async_steps=0, window=0)
    state = DriverState.capture(step=0, attempt=1, prompts=queue, buffer=buffer, totals=totals, config=config)
    totals.tokens, totals.waste = 7, {"trained": 7}
    next(queue)
    assert state.totals == Totals() and state.stream["position"] == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_served_twice_or_too_old_over_many_restarts(
    data: st.DataObject, inputs: Inputs, quickstart_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random admissions, fates, steps and restarts: each occurrence meets one fate along the lineage, none is skipped,
    none that was finished is made anew, and no burst after a restart goes beyond the bound."""
    config = quickstart_config("run.seed=5")
    folder = tmp_path_factory.mktemp("state")
    async_steps = data.draw(st.integers(0, 2))
    shape = {"groups_per_batch": 2, "async_steps": async_steps, "window": 2 * async_steps}
    settled: set[tuple[int, int]] = set()
    version, queue, groups = 0, PromptQueue(stream_of(inputs)), list[Group]()
    for _ in range(data.draw(st.integers(1, 4))):
        buffer, live = RolloutBuffer(**shape), version
        buffer.restore(groups, version=version)
        state = capture(config, queue, buffer, step=version)
        surviving = set(settled)
        for _ in range(data.draw(st.integers(0, 25))):
            running = [g for g in buffer.groups if g.state == "running"]
            moves = (
                ["live"] * (live < version) + ["admit"] * buffer.has_free_slot() + ["finish", "drop"] * bool(running)
            )
            batch = buffer.take_batch(version)
            if batch is not None:
                version += 1
                buffer.trained(batch, made_version=version)
                for group in batch:
                    assert version - 1 - group.admitted_version <= shape["window"]
                    settle(group, settled)
                if data.draw(st.booleans()):
                    state, surviving = capture(config, queue, buffer, step=version), set(settled)
            else:
                assert moves, "nothing can move: the run hangs"
                move = data.draw(st.sampled_from(moves))
                if move == "live":
                    live = version
                    buffer.release(live)
                elif move == "admit":
                    buffer.admit(next(queue), version=live, seed=0, now=0.0)
                    buffer.claim()
                else:
                    group = data.draw(st.sampled_from(running))
                    finish(buffer, group)
                    if move == "drop":
                        buffer.drop(group)
                        settle(group, settled)
        state.save(folder)
        settled, version = surviving, state.step
        state = DriverState.load(folder, config=config)
        stream = stream_of(inputs)
        queue, groups = state.prompts(stream), state.groups(stream)
        open_again = [(p.epoch, p.position) for p in [*queue.again, *(g.prompt for g in groups)]]
        assert len(open_again) == len(set(open_again)) and not settled.intersection(open_again)
        assert settled.union(open_again) == {(0, i) for i in range(queue.state()["position"])}


def settle(group: Group, settled: set[tuple[int, int]]) -> None:
    occurrence = (group.prompt.epoch, group.prompt.position)
    assert occurrence not in settled, "it met two fates"
    settled.add(occurrence)


def test_again_comes_before_the_stream(inputs: Inputs) -> None:
    stream = stream_of(inputs)
    first, second = stream.next(), stream.next()
    queue = PromptQueue(stream, [second, first])
    assert [next(queue).position for _ in range(3)] == [1, 0, 2]


def test_an_occurrence_has_its_seed_in_every_attempt(inputs: Inputs) -> None:
    stream = stream_of(inputs)
    prompts = [stream.prompt_at(epoch, position) for epoch in range(2) for position in range(500)]
    seeds = [request_seed(5, prompt) for prompt in prompts]
    assert seeds == [request_seed(5, prompt) for prompt in prompts]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(6, prompts[0]) != seeds[0]
