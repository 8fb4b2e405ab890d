"""The four loops of a run.

      feed ──admit──► RolloutBuffer ──claim──► roll_out ──► inference workers
       ▲                  │  ▲                    │
       │ free slot        │  └─ finish ◄─ verifiers ◄── samples, one by one
       │                  ▼
       └─ release ◄─ publish ◄─ train ◄──1── batch

feed, roll_out and batch run by themselves once `run()` is started; training is driven from outside, one batch at a
time (`Run.train`, or a loop of the user's own), so that the loop is a library too.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from olmorl.config.schema import Config
from olmorl.contract.errors import StarvationError
from olmorl.contract.generation import RolloutSample, SamplingParams
from olmorl.controller.admission import judge, keep_signal
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.failing import FailingVerifiers
from olmorl.controller.group import Group, State
from olmorl.controller.rollout import RolloutService
from olmorl.controller.sampling import sample_prompt
from olmorl.controller.scoring import Scorer
from olmorl.controller.signal import Changed
from olmorl.controller.starvation import Starvation
from olmorl.data.prompt import Prompt
from olmorl.data.selection import PromptSelection

log = logging.getLogger(__name__)

Drawn = tuple[list[Group], list[Group]]  # what is trained of a draw, and the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups to be trained together at `version`."""

    version: int
    groups: list[Group]
    surplus: list[Group]
    """drawn for this batch and not trained; they hold their slots as long as those that are, for the bound on age
    counts a batch's groups together"""
    seconds_waited_for_straggler: float


class Prompts(Protocol):
    @property
    def has_next(self) -> bool: ...
    def __next__(self) -> Prompt: ...


class RolloutLoops:
    def __init__(
        self,
        *,
        config: Config,
        buffer: RolloutBuffer,
        prompts: Prompts,
        service: RolloutService,
        scorer: Scorer,
        version: int,
        on_dropped: Callable[[Group], None],
        selection: PromptSelection | None = None,
    ) -> None:
        """`selection` is told what became of each group, and so of its row."""
        self._config = config
        self._buffer = buffer
        self._prompts = prompts
        self._service = service
        self._scorer = scorer
        self._on_dropped = on_dropped
        self._selection = selection
        self._starvation = Starvation(
            groups_per_batch=config.rollout.prompts_per_step, patience=config.rollout.starvation_patience
        )
        self._failing = FailingVerifiers(config.reward, groups_per_batch=config.rollout.prompts_per_step)
        self._starved: StarvationError | None = None
        self._changed = Changed()
        self._batches: asyncio.Queue[Batch] = asyncio.Queue(maxsize=1)
        self._next_batch_version = version
        self._live_version = version

    async def run(self) -> None:
        """Runs until cancelled; the first exception of any loop ends them all."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.feed())
            tasks.create_task(self.roll_out(tasks))
            tasks.create_task(self.batch())

    async def feed(self) -> None:
        """Consumes the prompt stream, produces waiting groups; waits for a free slot, and longer and longer while
        nothing comes of it; unblocked by a dropped group or by weights that went live."""
        while True:
            await self._changed.until(lambda: self._buffer.has_free_slot() and self._has_prompts)
            if pause := self._starvation.next_pause():
                told = self._starvation.describe()
                log.warning("no batch can be filled: %s; the next prompt waits %.3g s", told, pause)
                with suppress(TimeoutError):  # or until there is a batch
                    async with asyncio.timeout(pause):
                        await self._changed.until(self._buffer.has_enough_finished)
                continue  # the last prompt may have been retired meanwhile
            prompt = next(self._prompts)
            seed = request_seed(self._config.run.seed, prompt)
            self._buffer.admit(prompt, version=self._live_version, seed=seed, now=time.time())
            self._changed.notify()

    async def roll_out(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes waiting groups, produces finished ones; waits for a waiting group; unblocked by feed."""
        while True:
            while (group := self._buffer.claim()) is not None:
                tasks.create_task(self._roll_out_group(group))
            await self._changed.until(self._buffer.has_waiting)

    async def _roll_out_group(self, group: Group) -> None:
        def received(samples: Sequence[RolloutSample]) -> None:
            group.tokens_received += sum(len(sample.token_ids) for sample in samples)

        await sample_prompt(
            group.prompt,
            request_id=group.prompt.prompt_id,
            params=training_params(self._config, seed=group.seed),
            service=self._service,
            scorer=self._scorer,
            received=received,
            deliver=group.samples.extend,
        )
        group.samples.sort(key=lambda s: s.sample.sample_index)
        loss, rollout = self._config.loss, self._config.rollout
        group.has_signal = judge(
            group,
            scale=self._config.reward.scale,
            kind=loss.advantage,
            mask_truncated=loss.mask_truncated,
            unscored=self._config.reward.unscored,
        )
        self._failing.judged(group)
        self._buffer.finish(group)
        if not group.has_signal and rollout.active_sampling:
            self._drop(group)
        if rollout.oversampling or not self._buffer.has_enough_finished():
            self._starvation.offered(group)
        self._changed.notify()

    def _drop(self, group: Group) -> None:
        self._buffer.drop(group)
        self._record(group)
        self._on_dropped(group)

    async def batch(self) -> None:
        """Consumes finished groups, produces batches; waits for enough of them, for a straggler, and for the queue
        (one place); unblocked by roll_out and by the taking of a batch. Ends when the run is starved."""
        while True:
            version = self._next_batch_version
            await self._changed.until(lambda: self._buffer.has_enough_finished() or self._why_no_batch)
            blocked_since = time.perf_counter()
            found: Drawn | StarvationError = await self._changed.until(partial(self._look, version))
            if isinstance(found, StarvationError):
                self._starved = found
                self._changed.notify()
                return
            waited = time.perf_counter() - blocked_since
            self._next_batch_version += 1
            kept, surplus = found
            batch = Batch(version=version, groups=kept, surplus=surplus, seconds_waited_for_straggler=waited)
            await self._batches.put(batch)
            self._changed.notify()

    def _look(self, version: int) -> Drawn | StarvationError | None:
        """A batch, or why there will be none."""
        if self._why_no_verdict is not None:
            return StarvationError(self._why_no_verdict)
        while (groups := self._buffer.take_batch(version)) is not None:
            if drawn := self._choose(groups):
                return drawn
        reason = self._why_no_batch
        if reason is None:
            return None
        if self._config.rollout.on_starvation == "train_partial" and self._buffer.count(State.FINISHED):
            partial_batch = self._buffer.take_batch(version, partial=True)
            if partial_batch is None:
                return None
            if drawn := self._choose(partial_batch):
                log.warning("training a batch of %d groups: %s", len(drawn[0]), reason)
                return drawn
        return StarvationError(reason)

    def _choose(self, groups: list[Group]) -> Drawn | None:
        """Those of a taken batch that are trained, and the rest; None, and all dropped, if there is none to train."""
        rollout = self._config.rollout
        kept: list[Group] = groups
        surplus: list[Group] = []
        if rollout.oversampling:
            kept, surplus = keep_signal(groups, at_most=rollout.prompts_per_step)
        if kept:
            self._starvation.filled()
            return kept, surplus
        for group in surplus:
            self._drop(group)
        self._changed.notify()
        return None

    @property
    def _has_prompts(self) -> bool:
        return self._prompts.has_next and not self._starvation.exhausted

    @property
    def _why_no_verdict(self) -> str | None:
        if self._failing.trouble is not None:
            return self._failing.trouble
        limit = self._config.reward.outage_seconds
        seconds, trouble = self._scorer.outage()
        if limit is None or seconds < limit:
            return None
        return f"no verdicts for {seconds:.0f} s, reward.outage_seconds is {limit:g}: {trouble}"

    @property
    def _why_no_batch(self) -> str | None:
        """Set when nothing can be judged, or when nothing is under way and nothing will be."""
        if self._why_no_verdict is not None:
            return self._why_no_verdict
        if self._has_prompts or self._buffer.count(State.WAITING, State.RUNNING):
            return None
        told, wanted = self._starvation.describe(), self._config.rollout.prompts_per_step
        if not self._prompts.has_next:
            rate = self._config.rollout.no_resampling_pass_rate
            return f"every prompt has passed at a rate of {rate:g} or above and is retired ({told})"
        return (
            f"no batch of {wanted} groups with signal can be filled: {told}. Train on other prompts, or raise "
            "rollout.starvation_patience or rollout.samples_per_prompt"
        )

    async def next_batch(self) -> Batch:
        """Raises StarvationError when there will be no other."""
        return await self._changed.until(self._fetch)

    def _fetch(self) -> Batch | None:
        if not self._batches.empty():
            return self._batches.get_nowait()
        if self._starved is not None:
            raise self._starved
        return None

    def trained(self, batch: Batch) -> None:
        self._buffer.trained([*batch.groups, *batch.surplus], made_version=batch.version + 1)
        if self._selection is not None:
            self._selection.advance(batch.version + 1)
        for group in batch.groups:
            self._record(group)
        for group in batch.surplus:
            self._record(group)
            self._on_dropped(group)

    def _record(self, group: Group) -> None:
        if self._selection is not None:
            self._selection.record(group.prompt, pass_rate=group.pass_rate, has_signal=group.has_signal)

    def published(self, version: int) -> None:
        """Weights of `version` serve on every engine."""
        self._live_version = version
        self._buffer.release(version)
        self._changed.notify()


def training_params(config: Config, *, seed: int) -> SamplingParams:
    sampling, rollout = config.sampling, config.rollout
    return SamplingParams(
        n=rollout.samples_per_prompt,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=rollout.max_response_tokens,
        stop=sampling.stop,
        seed=seed,
    )


def request_seed(run_seed: int, prompt: Prompt) -> int:
    """31 bits from run seed, epoch and position: the same occurrence draws the same noise in every attempt."""
    key = f"{run_seed}/{prompt.epoch}/{prompt.position}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") & 0x7FFFFFFF
