"""Keeps the books of an attempt: groups that met their fate, tokens by bin, totals, one row a step.

A step's row is written when its update is live, from what was set apart when it was trained.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from olmorl.config.schema import Config
from olmorl.contract.training import StepReport
from olmorl.controller import step_metrics
from olmorl.controller.evaluate import Evaluation
from olmorl.controller.fleet import Fleet
from olmorl.controller.group import Fate, Group
from olmorl.controller.run_directory import RunDirectory
from olmorl.controller.step_metrics import StepTimes
from olmorl.controller.sync import UpdateReport
from olmorl.metrics.bag import MetricBag
from olmorl.metrics.ledger import WasteLedger
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
    waste: dict[str, int] = field(default_factory=dict)


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
    ) -> None:
        self._config = config
        self._directory = directory
        self._attempt = attempt
        self._fleet = fleet
        self._sinks = sinks
        self._ledger = WasteLedger()
        self._dropped: list[Group] = []
        self._updates: list[UpdateReport] = []
        self._stats_before: Stats = {}
        self._seconds_before = totals.seconds
        self._waste_before = dict(totals.waste)
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
            self._ledger.add(s.fate.value, len(s.sample.token_ids))
        totals = self.totals
        totals.episodes += len(samples)
        totals.tokens += sum(len(s.sample.token_ids) for s in samples)
        totals.trained_tokens += sum(len(s.sample.token_ids) for s in samples if s.fate is Fate.TRAINED)
        totals.seconds = self._seconds_before + now - self._t_started
        rewards = [s.reward for s in samples if s.reward is not None]
        if rewards:
            totals.reward_last = sum(rewards) / len(rewards)
            totals.reward_first = totals.reward_last if totals.reward_first is None else totals.reward_first
        self._add_up_waste()
        return Step(number=number, groups=groups, reports=reports, times=times, t_trained=time.time())

    def evaluated(self, evaluation: Evaluation) -> None:
        self._ledger.add("eval", evaluation.num_tokens)
        if self.totals.eval_before is None:
            self.totals.eval_before = evaluation.avg_at_k
        self.totals.eval_after = evaluation.avg_at_k

    def compared(self, *, num_tokens: int) -> None:
        """The parity gate had so many tokens generated; they are in the bin of evaluations."""
        self._ledger.add("eval", num_tokens)

    def updated(self, update: UpdateReport) -> None:
        """An update is live; the next row tells of it."""
        self._updates.append(update)

    def write_row(self, step: Step, evaluation: Evaluation | None, stats: Stats, faults: dict[str, float]) -> None:
        """Everything known of the step, to the rollout file and to every sink."""
        now = time.perf_counter()
        seconds, self._t_row = now - self._t_row, now
        bag = MetricBag()
        updates, self._updates = self._updates, []
        for update in updates:
            step_metrics.add_update(bag, update)
        step_metrics.add_times(bag, step.times)
        step_metrics.add_engines(bag, self._stats_before, stats, peak=self._fleet.engine_peak, seconds=seconds)
        if step.groups:
            step_metrics.add_rollouts(bag, step.groups, version=step.number - 1)
            step_metrics.add_training(
                bag, step.reports, peak_flops=self._fleet.learner_peak_flops, seconds=step.times.step
            )
            step_metrics.add_progress(bag, step.groups, seconds=step.times.step)
        if evaluation is not None:
            step_metrics.add_evaluation(bag, evaluation)
        totals = self.totals
        bag.update({"progress/episodes": totals.episodes, "progress/tokens_total": totals.tokens})
        bag.update(self._ledger.drain())
        bag.update(faults)
        self._stats_before = stats
        if self._config.logging.rollouts and step.groups:
            rows = step_metrics.rollout_rows(
                step.groups, step=step.number, attempt=self._attempt, t_trained=step.t_trained
            )
            write_rollouts(self._directory.rollouts_file(step.number), rows)
        metrics = bag.drain()
        for sink in self._sinks:
            sink.write(step.number, metrics)

    def close_books(self, *, received_tokens: int, pending_tokens: int) -> None:
        """Tokens of groups that were still under way are surplus; then the books must close, or LedgerError."""
        self._ledger.add("surplus", pending_tokens)
        for group in self._dropped:
            for s in group.samples:
                self._ledger.add(s.fate.value if s.fate else "error", len(s.sample.token_ids))
        self._ledger.check(received_tokens)
        self._add_up_waste()

    def close_sinks(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _add_up_waste(self) -> None:
        self.totals.waste = {name: self._waste_before.get(name, 0) + n for name, n in self._ledger.totals().items()}

    def summary(self, *, steps: int, exit_reason: str) -> dict[str, Any]:
        totals = self.totals
        return {
            "exit_reason": exit_reason,
            "steps": steps,
            **asdict(totals),
            "tokens_per_second": totals.tokens / totals.seconds if totals.seconds else 0.0,
            "trained_tokens_per_second": totals.trained_tokens / totals.seconds if totals.seconds else 0.0,
        }


def snapshot_stats(stats: Mapping[str, Mapping[str, float]]) -> Stats:
    return {worker: dict(counters) for worker, counters in stats.items()}
