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
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from olmorl.config.schema import Config
from olmorl.contract.generation import SamplingParams
from olmorl.controller.admission import judge
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.group import Group
from olmorl.controller.rollout import RolloutService
from olmorl.controller.scoring import Scorer
from olmorl.controller.signal import Changed
from olmorl.data.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups to be trained together at `version`."""

    version: int
    groups: list[Group]
    seconds_waited_for_straggler: float


class RolloutLoops:
    def __init__(
        self,
        *,
        config: Config,
        buffer: RolloutBuffer,
        prompts: Iterator[Prompt],
        service: RolloutService,
        scorer: Scorer,
        version: int,
        on_dropped: Callable[[Group], None],
    ) -> None:
        self._config = config
        self._buffer = buffer
        self._prompts = prompts
        self._service = service
        self._scorer = scorer
        self._on_dropped = on_dropped
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
        """Consumes the prompt stream, produces waiting groups; waits for a free slot; unblocked by a dropped group
        or by weights that went live."""
        while True:
            await self._changed.until(self._buffer.has_free_slot)
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
        params = training_params(self._config, seed=group.seed)
        async with aclosing(self._service.generate(group.prompt.prompt_id, group.prompt.token_ids, params)) as arrivals:
            async for samples in arrivals:
                group.tokens_received += sum(len(sample.token_ids) for sample in samples)
                group.samples += await self._scorer.score(group.prompt, samples)
        group.samples.sort(key=lambda s: s.sample.sample_index)
        self._buffer.finish(group)
        loss = self._config.loss
        has_signal = judge(
            group, scale=self._config.reward.scale, kind=loss.advantage, mask_truncated=loss.mask_truncated
        )
        if not has_signal and self._config.rollout.active_sampling:
            self._buffer.drop(group)
            self._on_dropped(group)
        self._changed.notify()

    async def batch(self) -> None:
        """Consumes finished groups, produces batches; waits for enough of them, for a straggler, and for the queue
        (one place); unblocked by roll_out and by the taking of a batch."""
        while True:
            version = self._next_batch_version
            await self._changed.until(self._buffer.has_enough_finished)
            blocked_since = time.perf_counter()
            groups = await self._changed.until(partial(self._buffer.take_batch, version))
            waited = time.perf_counter() - blocked_since
            self._next_batch_version += 1
            await self._batches.put(Batch(version=version, groups=groups, seconds_waited_for_straggler=waited))

    async def next_batch(self) -> Batch:
        return await self._batches.get()

    def trained(self, batch: Batch) -> None:
        self._buffer.trained(batch.groups, made_version=batch.version + 1)

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
