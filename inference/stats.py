"""What the engine counts, each step in O(1): totals that only grow, and the two physical costs of a step.

Bytes and FLOPs follow docs/numerics.md: weights are read once a step, keys and values once for each query token, and
the head is computed for the rows whose logits are wanted alone.
"""

import threading
import time
from dataclasses import asdict, dataclass, replace

import numpy as np

from inference.model.architecture import Architecture
from inference.scheduler import StepPlan
from inference.step_batch import StepBatch


@dataclass(slots=True)
class EngineStats:
    output_tokens: int = 0
    prefill_tokens_computed: int = 0
    prefill_tokens_shared: int = 0
    """prompt tokens that were not computed: a group mate or the prefix cache had them"""
    recomputed_tokens: int = 0
    """tokens computed again after a preemption or an update"""
    steps: int = 0
    prefill_steps: int = 0
    """steps that computed any prompt token"""
    tokens_computed: int = 0
    """rows that went through the decoder: prefilled, recomputed and decoded"""
    logit_rows: int = 0
    """rows that the head was computed for: of a prompt the last token's alone, unless its logprobs are asked for"""
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    """of the busy ones, those of steps that computed any prompt token; likewise the next two of `flops` and `bytes`"""
    prefill_flops: float = 0.0
    prefill_bytes: float = 0.0
    recompute_seconds: float = 0.0
    """of the busy ones, the share that went into recomputed tokens"""
    slot_steps: int = 0
    slot_steps_used: int = 0
    live_batch_sum: int = 0
    """running sequences, summed over steps"""
    preemptions: int = 0
    verifications: int = 0
    """drafts that were judged; each gave one token more than were accepted of it, unless the sample ended"""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    updates: int = 0
    stall_seconds: float = 0.0
    """time in which weight updates held the engine up"""
    finished: int = 0
    errors: int = 0

    def count(self, plan: StepPlan, *, running: int, slots_held: int) -> None:
        """One step more, before it is computed."""
        self.steps += 1
        self.live_batch_sum += running
        self.slot_steps += slots_held
        self.slot_steps_used += len(plan.chunks) + len(plan.starts)
        self.prefill_tokens_shared += plan.num_shared_tokens
        self.preemptions += plan.num_preempted
        prefill = 0
        for sequence, count in plan.chunks:
            if sequence.num_tokens == sequence.num_prompt:
                prefill += count
            elif (missing := sequence.num_tokens - sequence.num_computed) > 1:
                self.recomputed_tokens += min(count, missing - 1)
        self.prefill_tokens_computed += prefill
        self.prefill_steps += prefill > 0

    def spend(self, cost: tuple[float, float]) -> None:
        """(FLOPs, bytes) of something computed."""
        self.flops += cost[0]
        self.bytes += cost[1]

    def judged(self, drafted: int, accepted: int) -> None:
        """A draft, by the draws behind it."""
        self.verifications += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted


class CostModel:
    """FLOPs and bytes of a step, from what it really computed."""

    def __init__(
        self,
        arch: Architecture,
        *,
        num_parameters: int,
        element_size: int,
        weight_bytes: int | None = None,
        head_bytes: int | None = None,
        kv_head_bytes: int | None = None,
    ) -> None:
        """`weight_bytes` that a step with logits reads, `head_bytes` of those of the head, and `kv_head_bytes` of a key
        or value of one head, where they are not of `element_size`. A product counts as two FLOPs in any precision."""
        self.head_parameters = arch.vocab_size * arch.hidden_size
        self.body_parameters = num_parameters - self.head_parameters * (1 if arch.tied else 2)
        self.row_bytes = arch.hidden_size * element_size
        self.head_bytes = self.head_parameters * element_size if head_bytes is None else head_bytes
        self.body_bytes = self.body_parameters * element_size
        if weight_bytes is not None:
            self.body_bytes = weight_bytes - self.head_bytes
        self.kv_bytes_per_layer = 2 * arch.num_kv_heads * (kv_head_bytes or arch.head_dim * element_size)
        self.flops_per_pair = 4 * arch.num_heads * arch.head_dim
        windows = [layer.window for layer in arch.layers]
        self.layers_of_window = {window: windows.count(window) for window in set(windows)}
        self.num_layers = len(windows)

    def head(self, rows: int) -> tuple[float, float]:
        """(FLOPs, bytes) of the logits of so many rows, made in one step."""
        return 2.0 * self.head_parameters * rows, float(self.head_bytes if rows else 0)

    def body(self, batch: StepBatch) -> tuple[float, float]:
        """(FLOPs, bytes) of a step up to the last hidden states."""
        tokens = len(batch.token_ids_T)
        context_T = batch.positions_T + 1
        pairs = reads = 0
        for window, layers in self.layers_of_window.items():
            seen_T = context_T if window is None else np.minimum(context_T, window)
            pairs += layers * int(seen_T.sum())
            reads += layers * int(seen_T[batch.chunk_ends_C - 1].sum())  # one pass over the context a chunk
        flops = 2.0 * self.body_parameters * tokens + float(self.flops_per_pair) * pairs
        kv = float(self.kv_bytes_per_layer) * (reads + tokens * self.num_layers)
        return flops, self.body_bytes + tokens * self.row_bytes + kv


class StatsClock:
    """Engine totals together with what is derived from them or read off the engine at the moment."""

    def __init__(self) -> None:
        self.totals = EngineStats()
        self._started = time.perf_counter()
        self._border = threading.Lock()
        self._before = EngineStats()
        """the totals when the present step began"""
        self._step_began: float | None = None

    def begin_step(self) -> None:
        with self._border:
            self._before, self._step_began = replace(self.totals), time.perf_counter()

    def end_step(self) -> None:
        with self._border:
            assert self._step_began is not None, "no step has begun"
            self._spend(time.perf_counter() - self._step_began, self._before)
            self._step_began = None

    def _spend(self, seconds: float, before: EngineStats) -> None:
        totals = self.totals
        totals.busy_seconds += seconds
        if totals.prefill_steps > before.prefill_steps:
            totals.prefill_seconds += seconds
            totals.prefill_flops += totals.flops - before.flops
            totals.prefill_bytes += totals.bytes - before.bytes
        if recomputed := totals.recomputed_tokens - before.recomputed_tokens:
            totals.recompute_seconds += seconds * recomputed / (totals.tokens_computed - before.tokens_computed)

    def snapshot(self, **gauges: float) -> dict[str, float]:
        """From any thread. A step that is under way has not happened yet: nothing here tells of any part of it."""
        with self._border:
            if self._step_began is None:
                totals, now = replace(self.totals), time.perf_counter()
            else:
                totals, now = self._before, self._step_began
        steps = max(totals.steps, 1)
        return {
            **{name: float(value) for name, value in asdict(totals).items()},
            "wall_seconds": now - self._started,
            "tokens_per_second": totals.output_tokens / max(totals.busy_seconds, 1e-9),
            "mean_live_batch": totals.live_batch_sum / steps,
            "slot_waste": 1 - totals.slot_steps_used / max(totals.slot_steps, 1),
            **gauges,
        }
