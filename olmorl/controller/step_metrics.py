"""What a step says of itself in metrics.jsonl and in the rollout file. Kept out of the loops; decides nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from olmorl.contract.training import StepReport
from olmorl.controller.admission import token_versions
from olmorl.controller.evaluate import Evaluation
from olmorl.controller.group import Fate, Group
from olmorl.controller.sync import UpdateReport
from olmorl.metrics.bag import MetricBag
from olmorl.metrics.rollout_log import RolloutRow
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
    for group in groups:
        for s in group.samples:
            if s.reward is not None:
                bag.add("reward/mean", s.reward)
                bag.add("reward/std", s.reward, reduce="std")
                bag.add("reward/solve_rate", float(s.reward >= 1))
                if source := group.prompt.data_source:
                    bag.add(f"reward/{source}/mean", s.reward)
            length = len(s.sample.token_ids)
            bag.add("reward/unscored_fraction", float(s.reward is None))
            bag.add("rollout/response_length_mean", length)
            bag.add("rollout/response_length_max", length, reduce="max")
            bag.add("rollout/response_length_p95", length, reduce="p95")
            bag.add("rollout/truncated_fraction", float(s.sample.finish_reason == "length"))
            if s.fate is Fate.TRAINED:
                bag.add("off_policy/token_age_mean", version - token_versions(s))
        no_signal = not any(s.fate in (Fate.TRAINED, Fate.TRUNCATED) for s in group.samples)
        bag.add("reward/zero_variance_fraction", float(no_signal))


def add_progress(bag: MetricBag, groups: Sequence[Group], *, seconds: float) -> None:
    trained = [s for group in groups for s in group.samples if s.fate is Fate.TRAINED]
    bag.add("throughput/trained_tokens_per_second", sum(len(s.sample.token_ids) for s in trained) / seconds)
    bag.add("throughput/goodput", sum(len(s.sample.token_ids) for s in trained if s.advantage) / seconds)
    bag.add("progress/epoch", max(group.prompt.epoch for group in groups), reduce="max")


def add_engines(bag: MetricBag, before: Stats, after: Stats, *, peak: Peak, seconds: float) -> None:
    """Throughput and engine counters between two snapshots, over `seconds` of wall time."""
    total = {name: sum(since(before.get(w, {}), after[w], name) for w in after) for name in _COUNTERS}
    rate = total["output_tokens"] / seconds
    bag.add("throughput/tokens_per_second", rate, reduce="last")
    bag.add("throughput/tokens_per_second_per_device", rate / max(1, len(after) * peak.devices), reduce="last")
    for worker, counters in after.items():
        used = utilization(before.get(worker, {}), counters, peak=peak)
        bag.add("throughput/inference_mfu", used.mfu)
        bag.add("throughput/inference_mbu", used.mbu)
        bag.add("engine/kv_usage", counters.get("kv_usage", 0.0))
    if total["steps"]:
        bag.add("engine/live_batch_mean", total["live_batch_sum"] / total["steps"])
        bag.add("engine/step_seconds", total["busy_seconds"] / total["steps"])
    if total["slot_steps"]:
        bag.add("engine/slot_waste", 1 - total["slot_steps_used"] / total["slot_steps"])
    prefill = total["prefill_tokens_computed"] + total["prefill_tokens_shared"]
    if prefill:
        bag.add("engine/prefix_hit_rate", total["prefill_tokens_shared"] / prefill)
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
)


def add_training(bag: MetricBag, reports: Sequence[StepReport], *, peak_flops: float, seconds: float) -> None:
    bag.update(reports[0].metrics)
    bag.add("throughput/learner_mfu", sum(r.flops for r in reports) / (seconds * peak_flops * len(reports)))


def add_update(bag: MetricBag, report: UpdateReport) -> None:
    bag.add("sync/seconds", report.seconds)
    bag.add("sync/stall_seconds", report.stall_seconds)
    bag.add("sync/bytes", report.num_bytes)
    bag.add("canary/checksum_ok", 1.0)
    if report.canary_mean is not None and report.canary_max is not None:
        bag.add("canary/logprob_abs_diff_mean", report.canary_mean)
        bag.add("canary/logprob_abs_diff_max", report.canary_max, reduce="max")


def add_evaluation(bag: MetricBag, evaluation: Evaluation) -> None:
    bag.add("eval/heldout/avg_at_k", evaluation.avg_at_k)
    bag.add("eval/heldout/pass_at_k", evaluation.pass_at_k)


def add_times(bag: MetricBag, times: StepTimes) -> None:
    for name in StepTimes.__dataclass_fields__:
        bag.add(f"time/{name}", getattr(times, name))


def rollout_rows(groups: Iterable[Group], *, step: int, attempt: int, t_trained: float) -> list[RolloutRow]:
    rows = []
    for group in groups:
        for s in group.samples:
            assert s.fate is not None, f"{group.prompt.prompt_id}: a sample without a fate"
            trained = s.fate is Fate.TRAINED
            rows.append(
                RolloutRow(
                    rollout_id=f"{group.prompt.prompt_id}_{s.sample.sample_index}",
                    prompt_id=group.prompt.prompt_id,
                    sample=s.sample.sample_index,
                    step=step,
                    attempt=attempt,
                    data_source=group.prompt.data_source,
                    prompt_token_ids=group.prompt.token_ids,
                    token_ids=s.sample.token_ids,
                    loss_mask=np.full(len(s.sample.token_ids), trained),
                    logprobs=s.sample.logprobs,
                    raw_logprobs=s.sample.raw_logprobs,
                    version_spans=s.sample.version_spans,
                    kv_events=s.sample.kv_events,
                    text=s.sample.text,
                    finish_reason=s.sample.finish_reason,
                    reward=s.reward,
                    verdict=s.verdict,
                    advantage=s.advantage if trained else None,
                    fate=s.fate.value,
                    seed=group.seed,
                    worker=s.sample.worker,
                    t_admitted=group.t_admitted,
                    t_first_token=s.sample.t_first_token,
                    t_finished=s.sample.t_finished,
                    t_trained=t_trained if trained else None,
                )
            )
    return rows
