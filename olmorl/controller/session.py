"""One attempt of a run on started workers, step by step.

A step trains a batch and snapshots the weights; then, while the next batch already trains, its update goes out, the
slots it frees are refilled, an evaluation may run on it, and its row is written.
"""

import asyncio
import time
from collections.abc import Coroutine
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

from learner.pack import pack, unpack
from olmorl.config.schema import Config
from olmorl.contract.errors import StarvationError
from olmorl.controller.admission import train_samples
from olmorl.controller.background import Background
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.evaluate import EvalSet, Evaluation, evaluate
from olmorl.controller.failing import WHAT_TO_DO, first_failing
from olmorl.controller.fleet import Fleet
from olmorl.controller.group import Fate, Group
from olmorl.controller.loop import Batch, RolloutLoops
from olmorl.controller.parity import ParityGate
from olmorl.controller.recorder import Recorder, Step, snapshot_stats
from olmorl.controller.resume import DriverState, PromptQueue
from olmorl.controller.rollout import RolloutService
from olmorl.controller.run_directory import RunDirectory
from olmorl.controller.scoring import Scorer
from olmorl.controller.step_metrics import StepTimes
from olmorl.controller.supervisor import EngineSupervisor, watch_learners
from olmorl.controller.sync import WeightSync
from olmorl.data.selection import PromptSelection
from olmorl.metrics.time_ledger import TimeLedger
from olmorl.metrics.timeline import Timeline

T = TypeVar("T")

CHECKPOINT = "checkpoint"  # the background job that writes one
LEARNERS = "learners"  # the loop that sees whether they live
CLOSING_SECONDS = 60.0  # that it gets when a run is stopped


class Session:
    def __init__(
        self,
        *,
        config: Config,
        directory: RunDirectory,
        fleet: Fleet,
        service: RolloutService,
        sync: WeightSync,
        gate: ParityGate,
        supervisor: EngineSupervisor,
        scorer: Scorer,
        prompts: PromptQueue,
        eval_sets: tuple[EvalSet, ...],
        recorder: Recorder,
        attempt: int,
        groups: list[Group],
        timeline: Timeline | None,
        learner_time: TimeLedger,
        selection: PromptSelection,
        version: int,
    ) -> None:
        """`groups` were finished by an earlier attempt and wait to be trained at `version` or later."""
        self._config = config
        self._directory = directory
        self._fleet = fleet
        self._service = service
        self._sync = sync
        self._gate = gate
        self._supervisor = supervisor
        self._scorer = scorer
        self._prompts = prompts
        self._eval_sets = eval_sets
        self._recorder = recorder
        self._attempt = attempt
        self._timeline = timeline
        self._learner_time = learner_time
        rollout = config.rollout
        self._buffer = RolloutBuffer(
            groups_per_batch=rollout.prompts_per_step * (rollout.oversampling or 1),
            async_steps=rollout.async_steps,
            window=rollout.staleness_window,
            max_overtaken=0 if rollout.oversampling else rollout.max_overtaken,
        )
        self._buffer.restore(groups, version=version)
        self._loops = RolloutLoops(
            config=config,
            buffer=self._buffer,
            prompts=prompts,
            service=service,
            scorer=scorer,
            version=version,
            on_dropped=recorder.dropped,
            selection=selection,
        )
        self._selection = selection
        self._background = Background()
        self._step = Step(number=version)
        self._state: DriverState | None = None
        self._times = StepTimes()
        self.version = version

    async def start(self) -> None:
        """Send the first update, compare engines and learner, evaluate the policy as it is, and let the loops run.

        Raises StarvationError when a verifier failed at all samples of an evaluation set.
        """
        heartbeat = self._config.cluster.heartbeat_seconds
        self._background.start_loop("service", self._service.run())
        self._background.start_loop("supervisor", self._supervisor.run())
        self._background.start_loop(LEARNERS, watch_learners(self._fleet.learners, heartbeat_seconds=heartbeat))
        if self._timeline is not None:
            self._background.start_loop("timeline", self._write_timeline(self._timeline))
        self._learner_time.enter("waiting")
        await self._snapshot()
        await self._background.unless_failed(self._go_live(self._step, first=True))
        self._background.start_loop("rollouts", self._loops.run())

    async def next_batch(self) -> Batch:
        """Raises StarvationError, with the step before saved, when there will be no other."""
        started = time.perf_counter()
        try:
            batch = await self._background.unless_failed(self._loops.next_batch())
        except StarvationError:
            await self._end_starved()
            raise
        self._times.wait_for_batch = time.perf_counter() - started
        self._times.wait_for_straggler = batch.seconds_waited_for_straggler
        return batch

    async def _end_starved(self) -> None:
        """The last step is saved; what met its fate since stands under the step that never came; the books close."""
        if self._state is not None:
            await self._save(self._state)
        await self._background.finish_job(CHECKPOINT)
        if self._background.runs("rollouts"):  # else this was told before
            await self.settle()
            await self._stop_rollouts()
            self._recorder.settle_dropped(self.version + 1)
            self._close_books()

    async def train_step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch`; `publish` sends the weights it makes. Returns the learner's metrics."""
        started = time.perf_counter()
        samples = [sample for group in batch.groups for sample in train_samples(group)]
        rank_batches = pack(
            samples,
            version=batch.version,
            num_ranks=len(self._fleet.learners),
            tokens_per_micro_batch=self._config.learner.tokens_per_micro_batch,
            num_mini_batches=self._config.optim.mini_batches,
            attention_tokens=self._fleet.learner_info.attention_tokens,
        )
        deadline = self._config.learner.step_timeout_seconds
        with self._learner_time.during("training"):
            calls = [
                learner.call("train_step", rank_batch, timeout=deadline)
                for learner, rank_batch in zip(self._fleet.learners, rank_batches, strict=True)
            ]
            reports = await self._background.unless_failed(gather(calls))
        # From here on nothing awaits: the step's groups and the captured state speak of one instant.
        self._times.train = time.perf_counter() - started
        self._times.reward = self._scorer.drain_seconds()
        logprobs = unpack(rank_batches, [r.old_logprobs for r in reports], [len(s.token_ids) for s in samples])
        trained = [s for group in batch.groups for s in group.samples if s.fate is Fate.TRAINED]
        for scored, of_learner in zip(trained, logprobs, strict=True):
            scored.learner_logprobs = of_learner
        self._loops.trained(batch)
        self.version = batch.version + 1
        self._step = self._recorder.trained(self.version, batch.groups, reports, self._times)
        self._times = StepTimes()
        self._state = self._capture()
        return dict(reports[0].metrics)

    async def publish(self) -> None:
        """Snapshot the weights and send them in the background; waits for the update before this one."""
        started = time.perf_counter()
        await self.settle()
        self._times.wait_for_policy = time.perf_counter() - started
        if self.version == self._config.run.steps:
            await self._stop_rollouts()
        await self._snapshot()
        self._background.start_job(self._go_live(self._step))

    async def _snapshot(self) -> None:
        with self._learner_time.during("sending"):
            await self._background.unless_failed(self._sync.snapshot(self.version))

    async def settle(self) -> None:
        """Wait until the update under way is live and its row is written."""
        await self._background.finish_job()

    async def checkpoint(self) -> None:
        """Begin to save weights, optimizer and driver state of the step just trained, if one is due.

        Returns when the learners have copied their state; the files are written while training goes on. Waits for the
        checkpoint before this one.
        """
        if self._state is not None and self._checkpoint_due:
            await self._save(self._state)

    async def _save(self, state: DriverState) -> None:
        self._state = None
        await self.settle()
        started = time.perf_counter()
        await self._background.finish_job(CHECKPOINT)
        # Evaluations that went on when the state was captured have settled since; nothing else has.
        state = replace(state, totals=deepcopy(self._recorder.totals))
        self._recorder.check_books(received_tokens=self._service.tokens_received, pending_tokens=self._pending_tokens)
        folder = self._directory.checkpoint(self.version)
        folder.mkdir(parents=True)
        with self._learner_time.during("checkpointing"):
            await self._all_learners("save", str(folder / "learner"))
        self._background.start_job(self._complete_checkpoint(self.version, state), name=CHECKPOINT)
        self._times.checkpoint = time.perf_counter() - started

    async def _complete_checkpoint(self, version: int, state: DriverState) -> None:
        """The marker is set when every rank's files are on disk; a run killed before has the checkpoint before."""
        deadline = self._config.learner.step_timeout_seconds
        await gather([learner.call("finish_save", timeout=deadline) for learner in self._fleet.learners])
        await asyncio.to_thread(state.save, self._directory.checkpoint(version))  # seconds, where responses are long
        keep = self._config.checkpoint.keep
        await asyncio.to_thread(self._directory.complete_checkpoint, version, keep=keep)

    async def finish(self) -> None:
        """After the last step: the last update is live and saved, the books close, the model is exported."""
        await self.settle()
        await self._background.finish_job(CHECKPOINT)
        await self._stop_rollouts()
        self._close_books()
        if self._config.checkpoint.export:
            await self._all_learners("export", str(self._directory.export(self.version)))

    def _close_books(self) -> None:
        self._recorder.lost(self._service.lost_tokens)
        self._recorder.close_books(received_tokens=self._service.tokens_received, pending_tokens=self._pending_tokens)

    @property
    def peaks(self) -> dict[str, str]:
        """What MFU and MBU are shares of, by role."""
        return self._fleet.peaks

    def summary(self, exit_reason: str) -> dict[str, Any]:
        return {**self._recorder.summary(steps=self.version, exit_reason=exit_reason), "peaks": self.peaks}

    async def close(self) -> None:
        """Stop everything that still runs in the background; a checkpoint under way may first be completed."""
        await self._background.end_job(CHECKPOINT, timeout=CLOSING_SECONDS, needs=LEARNERS)
        await self._background.close()
        await self._sync.close()
        await self._service.close()
        self._recorder.received(self._service.tokens_received)
        self._recorder.close_sinks()
        if self._timeline is not None:
            self._timeline.close()

    async def _write_timeline(self, timeline: Timeline) -> None:
        """Consumes the newest counters of every worker; runs until it is stopped."""
        while True:
            timeline.write(self._service.stats, self._learner_time.totals(), now=time.time())
            await asyncio.sleep(self._config.logging.timeline_seconds)

    async def _go_live(self, step: Step, *, first: bool = False) -> None:
        self._recorder.updated(await self._sync.publish(step.number))
        if first:
            self._recorder.compared(num_tokens=await self._gate.check())
        self._loops.published(step.number)
        await self._keep_weights(step.number)
        if step.number > 0 and not step.groups:
            return  # a resumed run's first update belongs to a step that has its row, and its evaluation
        started = time.perf_counter()
        evaluations = await self._evaluate(step)
        step.times.eval = time.perf_counter() - started
        self._recorder.lost(self._service.lost_tokens)
        stats = snapshot_stats(self._service.stats)
        learner_time = self._learner_time.totals()
        also = {**self._recorder.balance(), **self._faults()}
        await asyncio.to_thread(self._recorder.write_row, step, evaluations, stats, learner_time, also)
        await asyncio.to_thread(self._recorder.received, self._service.tokens_received)
        if first:
            sets = ((one.set.name, one.groups) for one in evaluations)
            if trouble := first_failing(sets, self._config.reward):
                raise StarvationError(f"{trouble}. {WHAT_TO_DO}")

    async def _keep_weights(self, version: int) -> None:
        """Before the next snapshot takes their place."""
        count = self._config.checkpoint.keep_versions
        if count:
            path, deadline = self._directory.weights(version), self._config.learner.step_timeout_seconds
            await self._fleet.learners[0].call("keep_weights", version, str(path), timeout=deadline)
            self._directory.keep_newest_weights(count)

    async def _evaluate(self, step: Step) -> list[Evaluation]:
        """What is due at this version. A resumed run has the row of its first version, and what was due then in it."""
        version, every, last = step.number, self._config.eval.every, self._config.run.steps
        due = version in (0, last) or (every and version % every == 0 and step.groups)
        if not due or not self._eval_sets:
            return []
        evaluations = await evaluate(
            self._eval_sets, config=self._config, service=self._service, scorer=self._scorer, version=version
        )
        self._recorder.evaluated(evaluations)
        return evaluations

    def _faults(self) -> dict[str, float]:
        return {
            "faults/worker_restarts": self._supervisor.restarts,
            "faults/prompts_reissued": self._service.reissued_requests,
            "sync/failures": self._sync.failures,
            "active_sampling/retired_prompts": self._selection.num_retired,
            "active_sampling/resting_prompts": self._selection.num_resting,
            "active_sampling/skipped_prompts": self._selection.num_skipped,
        }

    @property
    def _checkpoint_due(self) -> bool:
        return self.version % self._config.checkpoint.every == 0 or self.version == self._config.run.steps

    def _capture(self) -> DriverState:
        return DriverState.capture(
            step=self.version,
            attempt=self._attempt,
            prompts=self._prompts,
            buffer=self._buffer,
            totals=self._recorder.totals,
            config=self._config,
        )

    async def _stop_rollouts(self) -> None:
        """No more training prompts: what is under way is given up."""
        if not self._background.runs("rollouts"):
            return
        given_up = self._service.in_flight
        await self._background.stop_loop("rollouts")
        await self._service.abort(given_up)  # what arrives from here on is late, and was never received

    @property
    def _pending_tokens(self) -> int:
        """Received, of training prompts without a fate."""
        return self._service.undelivered_tokens + sum(g.tokens_received for g in self._buffer.outstanding())

    async def _all_learners(self, method: str, *args: object) -> None:
        deadline = self._config.learner.step_timeout_seconds
        await self._background.unless_failed(
            gather([x.call(method, *args, timeout=deadline) for x in self._fleet.learners])
        )


async def gather(calls: list[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*calls))
