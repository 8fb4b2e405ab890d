"""A run in virtual time: engines, verifiers, buffer, learner and weight updates, as olmorl.controller joins them.

      feed ─► RolloutBuffer ─► SimEngine × N ─► verifiers ─► batch ─► train ─► update ─► release

The scheduler and the buffer are the run's own; what they wait for is drawn from cost models. Everything follows from
the settings and one seed.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from inference.request import Sequence
from inference.scheduler import Scheduler
from olmorl.contract.errors import ConfigError
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.group import Group
from olmorl.data.prompt import Prompt
from olmorl.planner.events import Clock
from olmorl.planner.setup import Setup
from olmorl.planner.sim_engine import EngineTotals, SimEngine


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a simulation measured between its first counted step and its last; shares are fractions of 1."""

    steps: int
    seconds: float
    tokens_per_second: float
    trained_tokens_per_second: float
    step_seconds: float
    learner_wait_share: float
    train_seconds: float
    mfu: float
    mbu: float
    slot_waste: float
    live_batch: float
    stall_seconds: float
    """an engine's, an update"""
    preemption_share: float
    """recomputed tokens of all computed"""
    kv_used_share: float
    """of the engines' KV memory, averaged over steps"""
    lags: list[int] = field(default_factory=list)
    """of each trained token's sample: version trained on minus version admitted under"""

    @property
    def staleness_mean(self) -> float:
        return float(np.mean(self.lags)) if self.lags else 0.0

    @property
    def staleness_max(self) -> int:
        return max(self.lags, default=0)


@dataclass(slots=True)
class _Count:
    """Totals at an instant; an outcome is the difference of two."""

    time: float
    engines: list[EngineTotals]
    trained_tokens: int
    learner_busy: float
    trained_seconds: float
    updates: int


class Simulation:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        drawn = 1 if setup.active_sampling else setup.oversampling
        window = 2 * setup.async_steps if setup.window is None else setup.window
        self._buffer = RolloutBuffer(
            groups_per_batch=setup.prompts_per_step * drawn,
            async_steps=setup.async_steps,
            window=window,
            max_overtaken=setup.max_overtaken,
        )
        self._clock = Clock()
        self._engines = [SimEngine(_scheduler(setup), setup.engine, self._clock, on_finished=self._sampled)
                         for _ in range(setup.inference_workers)]  # fmt: skip
        self._held: list[Callable[[], None]] = []  # submissions that wait for a drained update
        self._draining: Callable[[], None] | None = None
        self._arrived: dict[int, int] = {}  # samples of a group that are scored
        self._drawn: dict[int, tuple[list[int], bool]] = {}
        self._next_number = 0
        self._live = 0
        self._next_batch_version = 0
        self._batch: list[Group] | None = None  # the one place of the queue
        self._learner_is_free = True
        self._publishing = False
        self._after_publish: Callable[[], None] | None = None
        self._trained_tokens = 0
        self._learner_busy = self._trained_seconds = 0.0
        self._lags: list[int] = []
        self.version = 0
        self._updates = 0

    def run(self, steps: int, *, warm_up: int = 0) -> Outcome:
        """Simulate `warm_up` + `steps` optimizer steps; the outcome is that of the last `steps`.

        Raises:
            ConfigError: nothing moves any more, which a run with these settings would do too.
        """
        self._feed()
        before = self._count()
        while self.version < warm_up + steps:
            if not self._clock.step():
                raise ConfigError(f"the simulated run stands still at step {self.version}: nobody waits for anything")
            if self.version >= warm_up > 0 and before.time == 0.0:
                before, self._lags = self._count(), []
        return self._outcome(before, self._count(), steps)

    # Rollouts

    def _feed(self) -> None:
        setup = self._setup
        while self._buffer.has_free_slot():
            number = self._next_number
            self._next_number += 1
            prompt = Prompt.__new__(Prompt)  # its text plays no part
            group = self._buffer.admit(prompt, version=self._live, seed=number, now=self._clock.now)
            assert self._buffer.claim() is group
            self._drawn[group.order] = setup.load.group(number, setup.samples_per_prompt, seed=setup.seed)
            self._submit(group)

    def _submit(self, group: Group) -> None:
        def submit() -> None:
            engine = min(self._engines, key=lambda e: e.in_flight)
            engine.submit(group, self._setup.load.prompt_tokens, self._drawn[group.order][0])

        if self._draining is not None:
            self._held.append(submit)
        else:
            submit()

    def _sampled(self, group: Group, _sequence: Sequence) -> None:
        self._clock.after(self._setup.load.verifier_seconds, lambda: self._scored(group))
        self._look_for_drained()

    def _scored(self, group: Group) -> None:
        self._arrived[group.order] = self._arrived.get(group.order, 0) + 1
        if self._arrived[group.order] < self._setup.samples_per_prompt:
            return
        self._buffer.finish(group)
        if self._setup.active_sampling and not self._drawn[group.order][1]:
            self._buffer.drop(group)
            self._forget(group)
        self._feed()
        self._look_for_batch()

    def _forget(self, group: Group) -> None:
        del self._drawn[group.order], self._arrived[group.order]

    # Training

    def _look_for_batch(self) -> None:
        if self._batch is None:
            self._batch = self._buffer.take_batch(self._next_batch_version)
            if self._batch is not None:
                self._next_batch_version += 1
        if self._batch is not None and self._learner_is_free:
            self._train()

    def _train(self) -> None:
        assert self._batch is not None
        batch, self._batch = self._batch, None
        self._learner_is_free = False
        trained = [group for group in batch if self._drawn[group.order][1]][: self._setup.prompts_per_step]
        responses = [self._drawn[group.order][0] for group in trained]
        seconds = self._setup.learner.train_seconds(self._setup.load.prompt_tokens, responses)
        if any(engine.in_flight for engine in self._engines):
            seconds *= self._setup.sharing.learner
        self._share(self._setup.sharing.engine)
        self._trained_seconds += seconds
        self._learner_busy += seconds + self._setup.sync.snapshot_seconds

        def done() -> None:
            self._share(1.0)
            self._buffer.trained(batch, made_version=self.version + 1)
            for group in trained:
                lengths = self._drawn[group.order][0]
                self._trained_tokens += sum(lengths)
                self._lags += [self.version - group.admitted_version] * len(lengths)
            for group in batch:
                self._forget(group)
            self.version += 1
            self._when_published(self._publish)

        self._clock.after(seconds, done)
        self._look_for_batch()

    def _share(self, slowdown: float) -> None:
        if self._setup.sharing.engine != 1.0:
            for engine in self._engines:
                engine.slow_down(slowdown)

    def _when_published(self, work: Callable[[], None]) -> None:
        """The update before must be live; until then the learner waits."""
        if self._publishing:
            self._after_publish = work
        else:
            work()

    # Updates

    def _publish(self) -> None:
        self._publishing = True
        version = self.version

        def snapshot_taken() -> None:
            self._learner_is_free = True
            {"inflight": self._send, "pause": self._send_paused, "drain": self._drain}[self._setup.sync_mode](version)
            self._look_for_batch()

        self._clock.after(self._setup.sync.snapshot_seconds, snapshot_taken)

    def _send(self, version: int) -> None:
        self._clock.after(self._setup.sync.transfer_seconds, lambda: self._commit(version))

    def _send_paused(self, version: int) -> None:
        for engine in self._engines:
            engine.pause()

        def sent() -> None:
            self._commit(version)
            for engine in self._engines:
                engine.resume(stalled=self._setup.sync.transfer_seconds)

        self._clock.after(self._setup.sync.transfer_seconds, sent)

    def _drain(self, version: int) -> None:
        """No new request until every engine is empty and has the weights."""
        since = self._clock.now

        def drained() -> None:
            self._clock.after(self._setup.sync.transfer_seconds, sent)

        def sent() -> None:
            for engine in self._engines:
                engine.totals.stall_seconds += self._clock.now - max(since, engine.idle_since)
            self._draining = None
            self._commit(version)
            held, self._held = self._held, []
            for submit in held:
                submit()

        self._draining = drained
        self._look_for_drained()

    def _look_for_drained(self) -> None:
        """An update that drains is sent when the last engine is empty; new requests wait until it has arrived."""
        if self._draining is not None and not any(engine.in_flight for engine in self._engines):
            drained, self._draining = self._draining, _nothing
            drained()

    def _commit(self, version: int) -> None:
        for engine in self._engines:
            engine.update(version, stall=self._setup.sync.swap_seconds, recompute=self._setup.recompute_kv)
        self._updates += 1
        self._live = version
        self._publishing = False
        self._buffer.release(version)
        self._feed()
        waiting, self._after_publish = self._after_publish, None
        if waiting is not None:
            waiting()
        self._look_for_batch()

    # Figures

    def _count(self) -> _Count:
        return _Count(
            self._clock.now,
            [copy(engine.totals) for engine in self._engines],
            self._trained_tokens,
            self._learner_busy,
            self._trained_seconds,
            self._updates,
        )

    def _outcome(self, before: _Count, after: _Count, steps: int) -> Outcome:
        seconds = after.time - before.time

        def total(name: str) -> float:
            pairs = zip(before.engines, after.engines, strict=True)
            return float(sum(getattr(new, name) - getattr(old, name) for old, new in pairs))

        cost, workers = self._setup.engine, self._setup.inference_workers
        devices = workers * cost.tensor_parallel
        return Outcome(
            steps=steps,
            seconds=seconds,
            tokens_per_second=total("output_tokens") / seconds,
            trained_tokens_per_second=(after.trained_tokens - before.trained_tokens) / seconds,
            step_seconds=seconds / steps,
            learner_wait_share=max(0.0, 1 - (after.learner_busy - before.learner_busy) / seconds),
            train_seconds=(after.trained_seconds - before.trained_seconds) / steps,
            mfu=total("flops") / seconds / cost.device.flops / devices,
            mbu=total("bytes") / seconds / cost.device.bandwidth / devices,
            slot_waste=1 - total("slot_steps_used") / max(total("slot_steps"), 1.0),
            live_batch=total("live_batch_sum") / max(total("steps"), 1.0),
            stall_seconds=total("stall_seconds") / workers / max(after.updates - before.updates, 1),
            preemption_share=total("recomputed_tokens") / max(total("computed_tokens"), 1.0),
            kv_used_share=total("kv_used_sum") / max(total("steps"), 1.0),
            lags=list(self._lags),
        )


def _nothing() -> None:
    """What is left to do of a drain that is being sent."""


def _scheduler(setup: Setup) -> Scheduler:
    return Scheduler(
        -(-setup.kv_cache_tokens // setup.block_size),
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_tokens_per_step=setup.max_tokens_per_step,
        prefix_caching=False,
        static=setup.batching == "static",
        window=setup.engine.shape.window,
    )
