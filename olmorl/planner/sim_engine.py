"""One inference worker in virtual time: the engine's own scheduler, with a cost in place of a model.

Steps that only decode are leapt over together. Whoever comes in between finds the engine where it would be by then: the
steps done so far are made real, and the change takes place at the end of the step under way, as in the engine.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Any, cast

from inference import lookahead
from inference.request import Request, Sequence
from inference.scheduler import Scheduler
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import SamplingParams
from olmorl.planner.costs import EngineCost
from olmorl.planner.events import Clock

_PARAMS = SamplingParams(max_tokens=1 << 30, ignore_eos=True)


@dataclass(slots=True)
class TokenCount:
    """In place of a sequence's token ids: only their number plays a part here, and there are millions."""

    number: int

    def __len__(self) -> int:
        return self.number

    def append(self, _token: int) -> None:
        self.number += 1

    def extend(self, tokens: Iterable[int]) -> None:
        self.number += length_hint(tokens)


@dataclass(slots=True)
class EngineTotals:
    steps: int = 0
    busy_seconds: float = 0.0
    stall_seconds: float = 0.0
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    slot_steps: int = 0
    slot_steps_used: int = 0
    live_batch_sum: int = 0
    kv_used_sum: float = 0.0
    """shares of the pool, a step each"""
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class _Leap:
    """Steps of mere decoding under way."""

    started: float
    seconds: float  # of one
    steps: int
    seen: float  # keys seen in a step halfway


class SimEngine:
    def __init__(
        self,
        scheduler: Scheduler,
        cost: EngineCost,
        clock: Clock,
        *,
        on_finished: Callable[[Any, Sequence], None],
    ) -> None:
        """`on_finished(tag, sequence)`: a sample of the request submitted under `tag` is done."""
        self.scheduler = scheduler
        self.totals = EngineTotals()
        self.version = 0
        self._cost = cost
        self._alone = cost.slowdown
        self._clock = clock
        self._on_finished = on_finished
        self._leap: _Leap | None = None
        self._free_at = 0.0  # when the step or the stall under way ends
        self._wanted: list[Callable[[], None]] = []  # changes that wait for the end of a step
        self._woken: object = None  # the wake-up that counts; older ones are void
        self._paused = False
        self._arrivals = 0
        self._in_flight = 0
        self.idle_since = 0.0
        """when it last ran out of work"""

    @property
    def in_flight(self) -> int:
        """Samples asked for and not finished."""
        return self._in_flight

    def submit(self, tag: Any, prompt_tokens: int, lengths: list[int], *, priority: int = 0) -> None:
        request = Request(
            request_id=str(self._arrivals),
            prompt=[],
            params=_PARAMS,
            arrival=self._arrivals,
            seed=0,
            sample_indices=tuple(range(len(lengths))),
            stop_ids=frozenset(),
            max_tokens=prompt_tokens + max(lengths),
            priority=priority,
            tag=tag,
        )
        self._arrivals += 1
        self._in_flight += len(lengths)
        for sequence, length in zip(request.sequences, lengths, strict=True):
            sequence.num_prompt, sequence.token_ids = prompt_tokens, cast(list[int], TokenCount(prompt_tokens))
            sequence.max_tokens = prompt_tokens + length
        self._between_steps(lambda: self.scheduler.add(request))

    def update(self, version: int, *, stall: float, recompute: bool = False) -> None:
        """New weights, taken between two steps and `stall` seconds long."""

        def take() -> None:
            self.version = version
            self.scheduler.change_version(version, recompute=recompute)
            self.totals.stall_seconds += stall
            self._free_at = self._clock.now + stall

        self._between_steps(take)

    def slow_down(self, factor: float) -> None:
        """From the next step on each takes `factor` times as long as by itself."""

        def change() -> None:
            self._cost = replace(self._cost, slowdown=self._alone * factor)

        self._between_steps(change)

    def pause(self) -> None:
        def begin() -> None:
            self._paused = True

        self._between_steps(begin)

    def resume(self, *, stalled: float) -> None:
        """`stalled`: seconds for which it stood still, though it had work."""
        self._paused = False
        self.totals.stall_seconds += stalled
        self._wake_at(max(self._clock.now, self._free_at))

    # Time

    def _between_steps(self, change: Callable[[], None]) -> None:
        self._wanted.append(change)
        if self._leap is not None:
            self._cut_leap()
        else:
            self._wake_at(max(self._clock.now, self._free_at))

    def _cut_leap(self) -> None:
        """The leap ends with the step under way."""
        leap = self._leap
        assert leap is not None
        done = int((self._clock.now - leap.started) / leap.seconds + 1e-9)
        leap.steps = min(leap.steps, max(done + 1, 1))
        self._free_at = leap.started + leap.steps * leap.seconds
        self._wake_at(max(self._free_at, self._clock.now))

    def _wake_at(self, time: float) -> None:
        token = self._woken = object()
        self._clock.at(time, lambda: self._wake(token))

    def _wake(self, token: object) -> None:
        if token is not self._woken:
            return
        self._woken = None
        self._land()
        wanted, self._wanted = self._wanted, []
        for change in wanted:
            change()
        if self._clock.now < self._free_at - 1e-12:  # a change took time
            self._wake_at(self._free_at)
        elif not self._paused and self.scheduler.has_work:
            self._go()

    def _go(self) -> None:
        """Begin what comes next: a leap, or one step of the scheduler's plan."""
        steps = self.scheduler.steps_until_change()
        if steps > 1:
            running = self.scheduler.running
            seen = sum(self._cost.shape.seen(s.num_computed + 1 + steps / 2) for s in running)
            seconds = self._cost.step_seconds(tokens=len(running), sequences=len(running), pairs=seen, reads=seen)
            self._leap = _Leap(self._clock.now, seconds, steps, seen)
            self._free_at = self._clock.now + steps * seconds
            self._wake_at(self._free_at)
        else:
            self._one_step()

    def _land(self) -> None:
        """What a leap did becomes real."""
        leap, self._leap = self._leap, None
        if leap is None:
            return
        running = len(self.scheduler.running)
        self._count(leap.steps, leap.seconds, running, running, running, leap.seen, leap.seen)
        lookahead.leap(self.scheduler, leap.steps)
        self.totals.output_tokens += leap.steps * running
        self._finish([s for s in self.scheduler.running if s.num_computed + 1 >= s.max_tokens])

    def _one_step(self) -> None:
        plan = self.scheduler.schedule()
        if plan.outgrown or not (plan.chunks or plan.starts or plan.num_preempted):
            room = self.scheduler.kv.cache.allocator.num_blocks * self.scheduler.block_size
            raise ConfigError(
                f"a sample needs more than all the {room:,} tokens of KV that an engine has; raise "
                "inference.kv_cache_tokens, or take devices with more memory"
            )
        pairs = reads = 0.0
        drawing = []
        for sequence, count in plan.chunks:
            context, missing = sequence.num_computed + count, sequence.num_tokens - sequence.num_computed
            seen = self._cost.shape.seen(context)
            reads += seen
            pairs += seen if count == 1 else count * self._cost.shape.seen(context - (count - 1) / 2)
            if count == missing:
                drawing.append(sequence)
            if missing > 1 and sequence.num_output:
                self.totals.recomputed_tokens += min(count, missing - 1)
        drawing += [s for s, _ in plan.starts]
        tokens = sum(count for _, count in plan.chunks)
        seconds = self._cost.step_seconds(
            tokens=tokens, sequences=len(plan.chunks), pairs=pairs, reads=reads, drawn=len(drawing)
        )
        self.totals.preemptions += plan.num_preempted
        self._count(1, seconds, len(plan.chunks) + len(plan.starts), tokens, len(drawing), pairs, reads)
        for sequence, count in plan.chunks:
            self.scheduler.computed(sequence, count)
        for sequence in drawing:
            sequence.token_ids.append(0)
        self.totals.output_tokens += len(drawing)
        self._free_at = self._clock.now + seconds
        # The samples are done when the step is, but nobody looks before.
        self._finish([s for s in drawing if s.num_tokens >= s.max_tokens], at=self._free_at)
        self._wake_at(self._free_at)

    def _finish(self, sequences: list[Sequence], *, at: float | None = None) -> None:
        self.scheduler.finish(sequences)
        for sequence in sequences:
            self._clock.at(at or self._clock.now, lambda s=sequence: self._tell(s))  # type: ignore[misc]

    def _tell(self, sequence: Sequence) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self.idle_since = self._clock.now
        self._on_finished(sequence.request.tag, sequence)

    def _count(
        self, steps: int, seconds: float, used: int, tokens: int, drawn: int, pairs: float, reads: float
    ) -> None:
        totals, shape = self.totals, self._cost.shape
        totals.steps += steps
        totals.busy_seconds += steps * seconds
        totals.computed_tokens += steps * tokens
        totals.slot_steps += steps * self.scheduler.slots_held
        totals.slot_steps_used += steps * used
        totals.live_batch_sum += steps * len(self.scheduler.running)
        pool = self.scheduler.allocator
        totals.kv_used_sum += steps * (1 - pool.num_free / pool.num_blocks)
        totals.flops += steps * shape.flops(tokens, pairs, drawn=drawn)
        totals.bytes += steps * shape.step_bytes(reads)
