"""What a step says of itself in metrics.jsonl and in the rollout file. Kept out of the loops; decides nothing."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from olmorl.contract.generation import OBSERVED
from olmorl.contract.training import StepReport
from olmorl.controller.evaluate import Evaluation
from olmorl.controller.group import Fate, Group, ScoredSample
from olmorl.controller.sync import UpdateReport
from olmorl.data.prompt import Prompt
from olmorl.metrics.bag import MetricBag
from olmorl.metrics.rollout_log import RolloutRow
from olmorl.metrics.time_ledger import engine_seconds
from olmorl.metrics.utilization import Peak, since, utilization

Stats = Mapping[str, Mapping[str, float]]  # worker name -> cumulative counters


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step, from one step's end to the next."""

    step: float = 0.0
    wait_for_batch: float = 0.0
    wait_for_straggler: float = 0.0
    wait_for_policy: float = 0.0
    train: float = 0.0
    reward: float = 0.0
    checkpoint: float = 0.0
    eval: float = 0.0


def add_rollouts(bag: MetricBag, groups: Sequence[Group], *, version: int) -> None:
    """Rewards, lengths and ages of every group that met its fate in this step, trained or not."""
    samples = [s for group in groups for s in group.samples]
    rewards: dict[str | None, list[float]] = defaultdict(list)  # by data source
    for group in groups:
        rewards[group.prompt.data_source] += [s.reward for s in group.samples if s.reward is not None]
    scored = [reward for of_source in rewards.values() for reward in of_source]
    bag.add("reward/mean", scored)
    bag.add("reward/std", scored, reduce="std")
    bag.add("reward/solve_rate", [float(passed) for group in groups for passed in group.passed])
    for source, of_source in rewards.items():
        if source:
            bag.add(f"reward/{source.replace('/', '_')}/mean", of_source)
    bag.add("reward/unscored_fraction", [float(s.reward is None) for s in samples])
    no_signal = [not any(s.fate in (Fate.TRAINED, Fate.TRUNCATED) for s in group.samples) for group in groups]
    bag.add("reward/zero_variance_fraction", [float(none) for none in no_signal])
    for verdict in ("timeout", "error", "unscorable"):
        bag.add(f"verdict/{verdict}", [float(s.verdict == verdict) for s in samples], reduce="sum")
    lengths = [s.num_drawn for s in samples]
    bag.add("rollout/response_length_mean", lengths)
    bag.add("rollout/response_length_max", lengths, reduce="max")
    bag.add("rollout/response_length_p95", lengths, reduce="p95")
    bag.add("rollout/truncated_fraction", [float(s.sample.finish_reason == "length") for s in samples])
    spans = [span for s in samples if s.fate is Fate.TRAINED for span in s.sample.version_spans if span[0] != OBSERVED]
    if tokens := sum(end - start for _, start, end in spans):
        age = sum((version - drawn_by) * (end - start) for drawn_by, start, end in spans)
        bag.add("off_policy/token_age_mean", age / tokens)


def add_selection(bag: MetricBag, groups: Sequence[Group]) -> None:
    """What was kept of what was offered, by length and pass rate; and whether groups that end early go first.

    Offered are all groups that met their fate in this step, kept those that are trained. Of the kept, some had been
    overtaken by a batch of younger groups: if these are longer than the others, short ones are trained first.
    """
    kept = [group for group in groups if any(s.fate is Fate.TRAINED for s in group.samples)]
    for name, some in (("offered", groups), ("kept", kept)):
        bag.add(f"active_sampling/{name}_groups", len(some), reduce="sum")
        bag.add(f"active_sampling/{name}_length_mean", _lengths(some))
        rates = [rate for group in some if (rate := group.pass_rate) is not None]
        for bin, (low, high) in PASS_RATE_BINS.items():
            bag.add(f"active_sampling/{name}_pass_rate/{bin}", [float(low <= rate <= high) for rate in rates])
    bag.add("active_sampling/overtaken_fraction", [float(group.overtaken) for group in kept])
    bag.add("active_sampling/overtaken_length_mean", _lengths([group for group in kept if group.overtaken]))
    bag.add("active_sampling/on_time_length_mean", _lengths([group for group in kept if not group.overtaken]))


_INSIDE = 1e-9
PASS_RATE_BINS = {"none": (0.0, 0.0), "low": (_INSIDE, 0.5), "high": (0.5 + _INSIDE, 1 - _INSIDE), "all": (1.0, 1.0)}


def _lengths(groups: Iterable[Group]) -> list[int]:
    return [s.num_drawn for group in groups for s in group.samples]


def add_progress(bag: MetricBag, groups: Sequence[Group], *, seconds: float) -> None:
    trained = [s for group in groups for s in group.samples if s.fate is Fate.TRAINED]
    bag.add("throughput/trained_tokens_per_second", sum(s.num_drawn for s in trained) / seconds)
    bag.add("throughput/goodput", sum(s.num_drawn for s in trained if s.advantage) / seconds)
    bag.add("progress/epoch", max(group.prompt.epoch for group in groups), reduce="max")


def add_engines(bag: MetricBag, before: Stats, after: Stats, *, peak: Peak, seconds: float, since_last: float) -> None:
    """Throughput and engine counters between two snapshots, over `seconds` of wall time; `since_last` snapshot, which
    for the first row is the start of the run."""
    total = {name: sum(since(before.get(w, {}), after[w], name) for w in after) for name in _COUNTERS}
    rate = total["output_tokens"] / seconds
    bag.add("throughput/tokens_per_second", rate, reduce="last")
    bag.add("throughput/tokens_per_second_per_device", rate / max(1, len(after) * peak.devices), reduce="last")
    for worker, counters in after.items():
        used = utilization(before.get(worker, {}), counters, peak=peak)
        bag.add("throughput/inference_mfu", used.mfu)
        bag.add("throughput/inference_mbu", used.mbu)
        bag.add("engine/kv_usage", counters.get("kv_usage", 0.0))
        span = since_last - counters.get("age_seconds", 0.0)  # what came after them is the next row's
        for kind, spent in engine_seconds(before.get(worker, {}), counters, span=span).items():
            bag.add(f"engine_time/{kind}", spent, reduce="sum")
    for name, value in _by_phase(before, after, peak).items():
        bag.add(f"throughput/{name}", value)
    if total["steps"]:
        bag.add("engine/live_batch_mean", total["live_batch_sum"] / total["steps"])
        bag.add("engine/step_seconds", total["busy_seconds"] / total["steps"])
    if total["slot_steps"]:
        bag.add("engine/slot_waste", 1 - total["slot_steps_used"] / total["slot_steps"])
    prefill = total["prefill_tokens_computed"] + total["prefill_tokens_shared"]
    if prefill:
        bag.add("engine/prefix_hit_rate", total["prefill_tokens_shared"] / prefill)
    if total["drafted_tokens"]:
        bag.add("engine/draft_acceptance", total["accepted_tokens"] / total["drafted_tokens"])
    for name in ("preemptions", "prefill_tokens_computed", "prefill_tokens_shared"):
        bag.add(f"engine/{name}", total[name], reduce="sum")


_COUNTERS = (
    "output_tokens",
    "steps",
    "busy_seconds",
    "live_batch_sum",
    "slot_steps",
    "slot_steps_used",
    "prefill_tokens_computed",
    "prefill_tokens_shared",
    "preemptions",
    "drafted_tokens",
    "accepted_tokens",
)


def _by_phase(before: Stats, after: Stats, peak: Peak) -> dict[str, float]:
    """Utilisation of the steps that only decoded and of those that prefilled, over the time these took."""
    names = ("seconds", "flops", "bytes")
    busy = [sum(since(before.get(w, {}), after[w], c) for w in after) for c in ("busy_seconds", "flops", "bytes")]
    prefill = [sum(since(before.get(w, {}), after[w], f"prefill_{name}") for w in after) for name in names]
    found = {}
    for phase, (seconds, flops, num_bytes) in (
        ("decode", tuple(b - p for b, p in zip(busy, prefill, strict=True))),
        ("prefill", tuple(prefill)),
    ):
        if seconds > 0:
            found[f"{phase}_mfu"] = flops / seconds / peak.flops
            found[f"{phase}_mbu"] = num_bytes / seconds / peak.bandwidth
    return found


def add_learner_time(bag: MetricBag, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    for kind, seconds in after.items():
        bag.add(f"learner_time/{kind}", seconds - before.get(kind, 0.0), reduce="sum")


def add_training(bag: MetricBag, reports: Sequence[StepReport], *, peak_flops: float, seconds: float) -> None:
    bag.update(reports[0].metrics)
    bag.add("throughput/learner_mfu", sum(r.flops for r in reports) / (seconds * peak_flops * len(reports)))


def add_update(bag: MetricBag, report: UpdateReport) -> None:
    bag.add("sync/seconds", report.seconds)
    bag.add("sync/stall_seconds", report.stall_seconds)
    bag.add("sync/bytes", report.num_bytes)
    bag.add("canary/checksum_ok", report.checksum_ok)
    if report.canary_mean is not None and report.canary_max is not None:
        bag.add("canary/logprob_abs_diff_mean", report.canary_mean)
        bag.add("canary/logprob_abs_diff_max", report.canary_max, reduce="max")


def add_evaluation(bag: MetricBag, evaluation: Evaluation) -> None:
    prefix = f"eval/{evaluation.set.name}"
    average, passed = evaluation.avg_at_k, evaluation.pass_at(evaluation.k)
    bag.add(f"{prefix}/avg_at_k", average.mean)
    bag.add(f"{prefix}/avg_at_k_stderr", average.standard_error)
    bag.add(f"{prefix}/pass_at_k", passed.mean)
    bag.add(f"{prefix}/pass_at_k_stderr", passed.standard_error)
    bag.add(f"{prefix}/unscored_fraction", evaluation.num_unscored / len(evaluation.lengths))
    bag.add(f"{prefix}/truncated_fraction", evaluation.truncated_fraction)
    bag.add(f"{prefix}/response_length_mean", evaluation.lengths)


def describe_evaluation(evaluation: Evaluation) -> dict[str, float | None]:
    """For the summary; None where an estimate cannot be known."""
    average, passed = evaluation.avg_at_k, evaluation.pass_at(evaluation.k)
    estimates = {
        "avg_at_k": average.mean,
        "avg_at_k_stderr": average.standard_error,
        "pass_at_k": passed.mean,
        "pass_at_k_stderr": passed.standard_error,
    }
    known = {name: value if math.isfinite(value) else None for name, value in estimates.items()}
    unscored = evaluation.num_unscored / max(1, len(evaluation.samples))
    return {"version": evaluation.version, "k": evaluation.k, "unscored_fraction": unscored, **known}


def add_times(bag: MetricBag, times: StepTimes) -> None:
    for name in StepTimes.__dataclass_fields__:
        bag.add(f"time/{name}", getattr(times, name))


def rollout_rows(groups: Iterable[Group], *, step: int, attempt: int, t_trained: float | None) -> list[RolloutRow]:
    """`t_trained` is None for groups that still wait to be trained: then their fate is the one that they will meet."""
    rows = []
    for group in groups:
        ground_truth = truths(group.prompt)
        for s in group.samples:
            assert s.fate is not None, f"{group.prompt.prompt_id}: a sample without a fate"
            rows.append(
                rollout_row(
                    group.prompt,
                    s,
                    step=step,
                    attempt=attempt,
                    seed=group.seed,
                    t_admitted=group.t_admitted,
                    t_trained=t_trained,
                    ground_truth=ground_truth,
                )
            )
    return rows


def rollout_row(
    prompt: Prompt,
    s: ScoredSample,
    *,
    step: int,
    attempt: int,
    seed: int,
    t_admitted: float,
    ground_truth: str | None,
    t_trained: float | None = None,
) -> RolloutRow:
    """`ground_truth`: the prompt's `truths`, once for all its samples. A sample without a fate is of a rollout that
    trains nothing: its mask says what the policy drew."""
    trained = s.fate is Fate.TRAINED
    return RolloutRow(
        rollout_id=f"{prompt.prompt_id}_{s.sample.sample_index}",
        prompt_id=prompt.prompt_id,
        sample=s.sample.sample_index,
        step=step,
        attempt=attempt,
        data_source=prompt.data_source,
        prompt_token_ids=prompt.token_ids,
        token_ids=s.sample.token_ids,
        loss_mask=s.loss_mask & (trained or s.fate is None),
        logprobs=s.sample.logprobs,
        raw_logprobs=s.sample.raw_logprobs,
        version_spans=s.sample.version_spans,
        kv_events=s.sample.kv_events,
        text=s.sample.text,
        finish_reason=s.sample.finish_reason,
        reward=s.reward,
        verdict=s.verdict,
        advantage=s.advantage if trained else None,
        fate=None if s.fate is None else s.fate.value,
        seed=seed,
        worker=s.sample.worker,
        t_admitted=t_admitted,
        t_first_token=s.sample.t_first_token,
        t_finished=s.sample.t_finished,
        t_trained=t_trained if trained else None,
        prompt=prompt.text,
        ground_truth=ground_truth,
        verdict_detail=s.detail,
        **({} if s.learner_logprobs is None else {"learner_logprobs": s.learner_logprobs}),
    )


def truths(prompt: Prompt) -> str | None:
    """As JSON; of several verifiers a list, of none None."""
    found = [check.ground_truth for check in prompt.checks]
    return json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False, default=str) if found else None


def evaluation_rows(evaluation: Evaluation, *, attempt: int) -> list[RolloutRow]:
    """As those of training; the set is their data source, and stands before their ids."""
    name = evaluation.set.name
    rows = rollout_rows(evaluation.groups, step=evaluation.version, attempt=attempt, t_trained=0.0)
    return [
        replace(row, rollout_id=f"{name}/{row.rollout_id}", prompt_id=f"{name}/{row.prompt_id}", data_source=name)
        for row in rows
    ]
