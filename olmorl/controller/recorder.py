"""Keeps the books of an attempt: groups that met their fate, tokens by bin, totals, one row a step.

A step's row is written when its update is live, from what was set apart when it was trained.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from olmorl.config.schema import Config
from olmorl.contract.training import StepReport
from olmorl.controller import step_metrics
from olmorl.controller.evaluate import Evaluation
from olmorl.controller.fleet import Fleet
from olmorl.controller.group import Fate, Group
from olmorl.controller.run_directory import RunDirectory, write_atomically
from olmorl.controller.step_metrics import StepTimes
from olmorl.controller.sync import UpdateReport
from olmorl.metrics.bag import MetricBag
from olmorl.metrics.ledger import Bin, WasteLedger
from olmorl.metrics.rollout_log import write_rollouts
from olmorl.metrics.sink import MetricSink

Stats = dict[str, dict[str, float]]


@dataclass(slots=True, kw_only=True)
class Totals:
    """What a run has added up over all its attempts, as far as they survive."""

    tokens: int = 0  # of samples that met their fate
    trained_tokens: int = 0
    episodes: int = 0
    seconds: float = 0.0
    reward_first: float | None = None
    reward_last: float | None = None
    eval_before: float | None = None
    eval_after: float | None = None
    """mean reward over the evaluation sets, of version 0 and of the last one evaluated, if it is another"""
    eval: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """the last evaluation of each set"""
    waste: dict[Bin, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Step:
    """What is known of a step; `groups` are all that met their fate in it, trained or not."""

    number: int
    groups: list[Group] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    t_trained: float = 0.0


class Recorder:
    def __init__(
        self,
        *,
        config: Config,
        directory: RunDirectory,
        attempt: int,
        fleet: Fleet,
        sinks: Sequence[MetricSink],
        totals: Totals,
        carried_tokens: int,
    ) -> None:
        """`totals` of the checkpoint that the attempt begins with; `carried_tokens` of the groups it holds untrained.

        Whatever else earlier attempts have received was for steps that are no more: it is rolled back.
        """
        self._config = config
        self._directory = directory
        self._attempt = attempt
        self._fleet = fleet
        self._sinks = sinks
        self._ledger = WasteLedger(totals.waste)
        accounted = self._ledger.settled_tokens + carried_tokens
        self._received_before = max(accounted, _read_number(directory.received_file))
        self._ledger.add("rolled_back", self._received_before - accounted)
        self._lost = 0
        self._dropped: list[Group] = []
        self._updates: list[UpdateReport] = []
        self._stats_before: Stats = {}
        self._learner_time_before: dict[str, float] = {}
        self._seconds_before = totals.seconds
        self._t_started = self._t_row = self._t_trained = time.perf_counter()
        self.totals = totals

    def dropped(self, group: Group) -> None:
        """A group met its fate without being trained; the next step to be trained takes it along."""
        self._dropped.append(group)

    def trained(self, number: int, groups: list[Group], reports: list[StepReport], times: StepTimes) -> Step:
        """Settle everything that met its fate up to this instant under step `number`. Never awaits."""
        now = time.perf_counter()
        times.step, self._t_trained = now - self._t_trained, now
        groups, self._dropped = [*groups, *self._dropped], []
        samples = [s for group in groups for s in group.samples]
        for s in samples:
            assert s.fate is not None, f"sample {s.sample.request_id}/{s.sample.sample_index} has no fate"
            self._ledger.add(s.fate.value, s.num_drawn)
        totals = self.totals
        totals.episodes += len(samples)
        totals.tokens += sum(s.num_drawn for s in samples)
        totals.trained_tokens += sum(s.num_drawn for s in samples if s.fate is Fate.TRAINED)
        totals.seconds = self._seconds_before + now - self._t_started
        rewards = [s.reward for s in samples if s.reward is not None]
        if rewards:
            totals.reward_last = sum(rewards) / len(rewards)
            totals.reward_first = totals.reward_last if totals.reward_first is None else totals.reward_first
        self._add_up_waste()
        return Step(number=number, groups=groups, reports=reports, times=times, t_trained=time.time())

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """What one version made of all sets."""
        totals = self.totals
        for evaluation in evaluations:
            self._ledger.add("eval", evaluation.num_tokens)
            totals.eval[evaluation.set.name] = step_metrics.describe_evaluation(evaluation)
        self._add_up_waste()
        means = [mean for evaluation in evaluations if math.isfinite(mean := evaluation.avg_at_k.mean)]
        average = sum(means) / len(means) if means else None
        if all(evaluation.version == 0 for evaluation in evaluations):
            totals.eval_before = average
        else:
            totals.eval_after = average

    def lost(self, tokens: int) -> None:
        """Made by workers that are no more, and never received: so many in all of this attempt."""
        self._ledger.add("lost", tokens - self._lost)
        self._lost = tokens

    def received(self, tokens: int) -> None:
        """Put on disk how many tokens this attempt has received so far: the next one may have to account for them."""
        write_atomically(self._directory.received_file, f"{self._received_before + tokens}\n")

    def compared(self, *, num_tokens: int) -> None:
        """The parity gate had so many tokens generated; they are in the bin of evaluations."""
        self._ledger.add("eval", num_tokens)

    def balance(self) -> dict[str, float]:
        """What was settled by now, and of each bin what came since the last balance: of one instant, so that the sum of
        the bins over all rows is the total."""
        totals = self.totals
        return {
            "progress/episodes": float(totals.episodes),
            "progress/tokens_total": float(totals.tokens),
            **self._ledger.drain(),
        }

    def updated(self, update: UpdateReport) -> None:
        """An update is live; the next row tells of it."""
        self._updates.append(update)

    def write_row(
        self,
        step: Step,
        evaluations: Sequence[Evaluation],
        stats: Stats,
        learner_time: dict[str, float],
        also: dict[str, float],
    ) -> None:
        """Everything known of the step, to the files of samples and to every sink. `learner_time`: seconds so far;
        `also`: metrics as they stand in the row. On a thread of its own: what the event loop changes comes as an
        argument."""
        now = time.perf_counter()
        seconds, self._t_row = now - self._t_row, now
        bag = MetricBag()
        updates, self._updates = self._updates, []
        for update in updates:
            step_metrics.add_update(bag, update)
        step_metrics.add_times(bag, step.times)
        since_last = sum(learner_time.values()) - sum(self._learner_time_before.values())
        step_metrics.add_engines(
            bag, self._stats_before, stats, peak=self._fleet.engine_peak, seconds=seconds, since_last=since_last
        )
        step_metrics.add_learner_time(bag, self._learner_time_before, learner_time)
        if step.groups:
            step_metrics.add_rollouts(bag, step.groups, version=step.number - 1)
            step_metrics.add_selection(bag, step.groups)
            step_metrics.add_training(
                bag, step.reports, peak_flops=self._fleet.learner_info.peak_flops, seconds=step.times.step
            )
            step_metrics.add_progress(bag, step.groups, seconds=step.times.step)
        for evaluation in evaluations:
            step_metrics.add_evaluation(bag, evaluation)
        bag.update(also)
        self._stats_before, self._learner_time_before = stats, learner_time
        self._write_rollouts(step)
        if evaluations:
            self._write_evaluations(step.number, evaluations)
        metrics = bag.drain()
        for sink in self._sinks:
            sink.write(step.number, metrics)

    def settle_dropped(self, number: int) -> None:
        """Of a run that ends before its step `number`: what met its fate untrained since the step before."""
        self._write_rollouts(self.trained(number, [], [], StepTimes()))

    def _write_rollouts(self, step: Step) -> None:
        if self._config.logging.rollouts and step.groups:
            rows = step_metrics.rollout_rows(
                step.groups, step=step.number, attempt=self._attempt, t_trained=step.t_trained
            )
            write_rollouts(self._directory.rollouts_file(step.number), rows)

    def _write_evaluations(self, version: int, evaluations: Sequence[Evaluation]) -> None:
        rows = {one.set.name: step_metrics.evaluation_rows(one, attempt=self._attempt) for one in evaluations}
        if self._config.logging.rollouts:
            write_rollouts(self._directory.evals_file(version), [row for of_set in rows.values() for row in of_set])
        for sink in self._sinks:
            sink.write_samples(version, rows)

    def check_books(self, *, received_tokens: int, pending_tokens: int) -> None:
        """Raises LedgerError unless every token received in this attempt or before has its bin, or is one of
        `pending_tokens`, of groups still under way."""
        pending = pending_tokens + self._dropped_tokens
        self._ledger.check(self._received_before + received_tokens, pending_tokens=pending)

    def close_books(self, *, received_tokens: int, pending_tokens: int) -> None:
        """Tokens of groups that met no fate in any step are surplus; then the books must close, or LedgerError."""
        self._ledger.add("surplus", pending_tokens + self._dropped_tokens)
        self._dropped = []
        self.check_books(received_tokens=received_tokens, pending_tokens=0)
        self._add_up_waste()

    @property
    def _dropped_tokens(self) -> int:
        return sum(s.num_drawn for group in self._dropped for s in group.samples)

    def close_sinks(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _add_up_waste(self) -> None:
        self.totals.waste = self._ledger.totals()

    def summary(self, *, steps: int, exit_reason: str) -> dict[str, Any]:
        totals = self.totals
        return {
            "exit_reason": exit_reason,
            "steps": steps,
            **asdict(totals),
            "tokens_per_second": totals.tokens / totals.seconds if totals.seconds else 0.0,
            "trained_tokens_per_second": totals.trained_tokens / totals.seconds if totals.seconds else 0.0,
        }


def _read_number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def snapshot_stats(stats: Mapping[str, Mapping[str, float]]) -> Stats:
    """A copy, with `age_seconds` of each worker's counters: they come a while before a row is made."""
    now = time.time()
    return {worker: {**counters, "age_seconds": now - counters.get("as_of", now)} for worker, counters in stats.items()}
