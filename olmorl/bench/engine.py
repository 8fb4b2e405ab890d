"""The engine on a recorded load: tokens a second, and how much of what the device can do that is.

A load is a list of {"prompt": [ids], "max_tokens": n, "group": g}; entries of one group share their prompt and are
samples of one request. EOS is ignored, so that every run does the same work.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import SamplingParams
from olmorl.metrics.rollout_log import read_rollouts, rollout_files

if TYPE_CHECKING:
    from inference.llm import LLM


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_whole, value))


_ENTRY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_are_ids, "a list of token ids"),
    "max_tokens": (lambda value: _is_whole(value) and value > 0, "a whole number above 0"),
    "group": (_is_whole, "a whole number"),
}


@dataclass(frozen=True, slots=True)
class Group:
    prompt: list[int]
    lengths: list[int]


@dataclass(slots=True)
class Spent:
    """What some steps took together."""

    steps: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


def read_workload(path: Path) -> list[Group]:
    """A JSON file, or the samples of the last step of a run."""
    if path.is_dir():
        found: dict[tuple[float, str], Group] = {}
        for row in read_rollouts(rollout_files(path)[-1]):
            prompt = row.prompt_token_ids.tolist()
            found.setdefault((row.t_admitted, row.prompt_id), Group(prompt, [])).lengths.append(
                max(1, len(row.token_ids))
            )
        return list(found.values())
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a workload: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} is not a workload: it must be a list of entries, and not an empty one")
    groups: dict[int, Group] = {}
    for index, entry in enumerate(entries):
        for name, (holds, what) in _ENTRY.items():
            if not isinstance(entry, dict) or name not in entry:
                raise ConfigError(f"{path}: entry {index} lacks {name!r}; an entry has {', '.join(_ENTRY)}")
            if not holds(entry[name]):
                raise ConfigError(f"{path}: entry {index}: {name} is {entry[name]!r:.80}; it must be {what}")
        group = groups.setdefault(entry["group"], Group(entry["prompt"], []))
        if group.prompt != entry["prompt"]:
            raise ConfigError(f"{path}: entry {index} has another prompt than its group {entry['group']}")
        group.lengths.append(entry["max_tokens"])
    return list(groups.values())


def bench_engine(model: str, workload: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Loading and one warm-up are not timed. `options` are fields of EngineConfig."""
    groups = read_workload(workload)
    from inference.llm import LLM
    from olmorl.planner.shape import shape_of

    llm = LLM(model, **options)
    for index, group in enumerate(groups):
        try:
            llm.engine.check(group.prompt, SamplingParams())
        except ValueError as error:
            raise ConfigError(f"{workload}: group {index + 1} of {len(groups)}: {error}") from None
    _warm_up(llm, groups[0])
    peak = llm.device_peak()
    before = llm.stats()
    started = time.perf_counter()
    for seed, group in enumerate(groups):
        params = SamplingParams(n=len(group.lengths), max_tokens=max(group.lengths), ignore_eos=True, seed=seed)
        llm.add_request(group.prompt, params, lengths=group.lengths)
    decode, prefill, profile = _run(llm)
    seconds = time.perf_counter() - started
    after = llm.stats()
    total = {name: after[name] - before[name] for name in after}
    result = {
        "output_tokens": int(total["output_tokens"]),
        "seconds": seconds,
        "tokens_per_second": total["output_tokens"] / seconds,
        "prefill_tokens_computed": int(total["prefill_tokens_computed"]),
        "prefill_tokens_shared": int(total["prefill_tokens_shared"]),
        "mean_live_batch": total["live_batch_sum"] / total["steps"],
        "slot_waste": 1 - total["slot_steps_used"] / total["slot_steps"],
        "steps": int(total["steps"]),
        "mfu": total["flops"] / seconds / peak.flops,
        "mbu": total["bytes"] / seconds / peak.bandwidth,
        "peak_gbs": peak.bandwidth / 1e9,
        "peak_tflops": peak.flops / 1e12,
        "peak_source": peak.source,
        "preemptions": int(total["preemptions"]),
        "active_parameters": shape_of(llm.engine.decoder.arch, name=model, element_size=4).active_parameters,
        "quantization": options.get("quantization"),
        "tensor_parallel_size": options.get("tensor_parallel_size", 1),
    }
    if options.get("speculative") is not None:
        result["speculative_step_tokens"] = llm.engine.speculation.step_tokens
        result["drafted_tokens"] = int(total["drafted_tokens"])
        result["accepted_tokens"] = int(total["accepted_tokens"])
        result["draft_acceptance"] = total["accepted_tokens"] / max(total["drafted_tokens"], 1)
        result["tokens_per_verification"] = 1 + total["accepted_tokens"] / max(total["verifications"], 1)
    for name, spent in (("decode", decode), ("prefill", prefill)):
        busy = spent.seconds or float("inf")
        result[f"{name}_steps"] = spent.steps
        result[f"{name}_seconds"] = spent.seconds
        result[f"{name}_mfu"] = spent.flops / busy / peak.flops
        result[f"{name}_mbu"] = spent.bytes / busy / peak.bandwidth
    result["profile"] = profile
    return result


def _warm_up(llm: "LLM", group: Group) -> None:
    """Compiles what will be needed, with a prompt that leaves nothing for the load in the prefix cache."""
    prompt = [(group.prompt[0] + 1) % llm.engine.vocab_size, *group.prompt[1:]]
    llm.generate([prompt], SamplingParams(n=min(len(group.lengths), 8), max_tokens=4, ignore_eos=True))


def _run(llm: "LLM") -> tuple[Spent, Spent, list[list[float]]]:
    """Steps that only decoded, steps that computed any token of a prompt, and of each step: tokens computed, FLOPs,
    seconds, rows of logits."""
    decode, prefill = Spent(), Spent()
    profile: list[list[float]] = []
    now, stats = time.perf_counter(), llm.stats()
    while llm.has_unfinished():
        llm.step()
        then, before = now, stats
        now, stats = time.perf_counter(), llm.stats()
        spent = prefill if stats["prefill_tokens_computed"] > before["prefill_tokens_computed"] else decode
        spent.steps += 1
        spent.seconds += now - then
        spent.flops += stats["flops"] - before["flops"]
        spent.bytes += stats["bytes"] - before["bytes"]
        tokens, flops, rows = (stats[name] - before[name] for name in ("tokens_computed", "flops", "logit_rows"))
        profile.append([tokens, flops, round(now - then, 7), rows])
    return decode, prefill, profile
