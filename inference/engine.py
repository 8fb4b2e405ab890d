"""The loop of the engine as a library: schedule, run, sample, stop, once for each `step()`.

Single-threaded on purpose: whatever happens between two steps (weights, scores, aborts) is a plain method call, so a
torn weight or a half-built batch cannot exist.
"""

import time
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from inference.model.load import eos_token_ids, load_decoder, resolve_folder
from inference.request import Request, Sequence
from inference.runner import Runner
from inference.sampler import SamplingTable, sample
from inference.scheduler import Scheduler, StepPlan
from inference.staged_update import StagedUpdate, model_checksum, stage_tensors
from inference.stats import CostModel, StatsClock
from inference.step_batch import BlockTable
from inference.stopping import StopMatcher, finish_reason
from inference.tokenizer import Tokenizer
from olmorl.contract.errors import ConfigError, WeightUpdateError
from olmorl.contract.generation import EngineConfig, Quantization, SamplingParams

KvPolicy = Literal["keep", "recompute"]


class Engine:
    def __init__(self, config: EngineConfig, *, initial_version: int = 0) -> None:
        _check_config(config)
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.folder: Path = resolve_folder(config.model)
        self.decoder = load_decoder(
            self.folder,
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            kernels=config.kernels,
            quantization=config.quantization,
            quantize_head=config.quantize_head,
        )
        if config.deterministic and self.decoder.compiled is None:
            raise ConfigError(
                "deterministic needs the compiled kernels: float32 on a CPU, heads of a multiple of 8, kernels 'auto'; "
                f"this is {config.dtype} on {config.device} with kernels = {config.kernels!r}"
            )
        self.max_model_len = config.max_model_len or self.decoder.arch.max_positions
        self.vocab_size = self.decoder.arch.vocab_size
        self.eos_ids = eos_token_ids(self.folder)
        self.tokenizer = Tokenizer(self.folder)
        self.version = initial_version
        self.scheduler = self._new_scheduler()
        self.runner = Runner(
            self.decoder,
            num_blocks=self.scheduler.allocator.num_blocks,
            block_size=config.block_size,
            num_window_blocks=self.scheduler.num_window_blocks,
        )
        windowed = self.scheduler.num_window_blocks is not None
        self.table = BlockTable(config.max_num_seqs, block_size=config.block_size, windowed=windowed)
        self.sampling = SamplingTable(config.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.num_arrived = 0
        self.clock = StatsClock()
        self._costs = CostModel(
            self.decoder.arch,
            num_parameters=self.decoder.num_parameters,
            element_size=self.decoder.embedding.element_size(),
            weight_bytes=self.decoder.streamed_bytes,
        )

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        # The widest window decides for all sliding layers; one that nothing outgrows is no window.
        window = max((layer.window or 0 for layer in self.decoder.arch.layers), default=0)
        scheduler = Scheduler(
            -(-config.kv_cache_tokens // config.block_size),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_tokens_per_step=config.max_tokens_per_step,
            prefix_caching=config.prefix_caching,
            static=config.batching == "static",
            window=window if 0 < window < self.max_model_len else None,
        )
        scheduler.cache.version = self.version
        return scheduler

    # Requests

    def check(self, prompt: Items[int], params: SamplingParams) -> None:
        """Raises ValueError for a request that can never run. Looks at nothing that changes: call it anywhere."""
        length, limit = len(prompt), self.max_model_len
        if length == 0:
            raise ValueError("the prompt is empty; give at least one token id")
        if length >= limit:
            raise ValueError(f"the prompt has {length} tokens; it must be shorter than max_model_len = {limit}")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token id {bad} is outside the vocabulary [0, {self.vocab_size})")
        if max(params.stop_token_ids, default=0) >= self.vocab_size:
            bad = max(params.stop_token_ids)
            raise ValueError(f"stop_token_ids holds {bad}, outside the vocabulary [0, {self.vocab_size})")
        room = self.scheduler.allocator.num_blocks * self.config.block_size
        if length > room:
            raise ValueError(f"the prompt has {length} tokens; the KV pool holds {room}; raise kv_cache_tokens")
        if params.stop and not self.tokenizer.exists:
            raise ValueError(f"stop strings need a tokenizer; {self.folder} has none")

    def add(
        self,
        request_id: str,
        prompt: Items[int],
        params: SamplingParams,
        *,
        sample_indices: tuple[int, ...] | None = None,
        lengths: Items[int] | None = None,
        priority: int = 0,
        tag: Any = None,
    ) -> Request:
        """`lengths` gives each sample a max_tokens of its own, as a replay of recorded rollouts needs."""
        if request_id in self.requests:
            raise ValueError(f"request {request_id!r} is already running")
        self.check(prompt, params)
        arrival = self.num_arrived
        self.num_arrived += 1
        # Without a seed: the engine's, told apart by arrival in bits that no seed of a user's can meet.
        seed = params.seed if params.seed is not None else (self.config.seed << 64) + (1 << 63) + arrival
        eos = () if params.ignore_eos else self.eos_ids
        request = Request(
            request_id,
            [int(token) for token in prompt],
            params,
            arrival,
            seed,
            tuple(range(params.n)) if sample_indices is None else sample_indices,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            max_tokens=min(len(prompt) + params.max_tokens, self.max_model_len),
            priority=priority,
            tag=tag,
        )
        if lengths is not None:
            for sequence, length in zip(request.sequences, lengths, strict=True):
                sequence.max_tokens = min(len(prompt) + length, request.max_tokens)
        if params.stop:
            for sequence in request.sequences:
                sequence.stop_matcher = StopMatcher(params.stop, self.tokenizer, num_prompt=len(prompt))
        self.requests[request_id] = request
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str) -> list[Sequence]:
        """The samples of the request that were not finished, with what they had. Empty for an unknown id."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        unfinished = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        for sequence in unfinished:
            sequence.finish_reason = "abort"
        self._retire(unfinished)
        return unfinished

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # One step

    def step(self) -> list[Sequence]:
        """Compute and draw once; the samples that finished by it."""
        if not self.scheduler.has_work:
            return []
        started, before = time.perf_counter(), replace(self.clock.totals)
        plan = self.scheduler.schedule()
        finished = self._give_up(plan)
        self.table.update(entered=plan.entered, grown=plan.grown)
        for sequence in plan.entered:
            self.sampling.set(sequence)
        self.runner.copy_blocks(plan.copies, plan.window_copies)
        if plan.chunks or plan.starts:
            finished += self._compute(plan)
        self._retire(finished)
        self.clock.spend(time.perf_counter() - started, before)
        return finished

    def _give_up(self, plan: StepPlan) -> list[Sequence]:
        for sequence in plan.outgrown:
            sequence.finish_reason = "abort"
            sequence.error = (
                f"{sequence.num_tokens} tokens outgrew the KV pool alone; raise kv_cache_tokens or lower max_tokens"
            )
        return list(plan.outgrown)

    def _compute(self, plan: StepPlan) -> list[Sequence]:
        hidden = None
        self._count(plan)
        if plan.chunks:
            batch = self.table.batch(plan.chunks)
            hidden = self.runner.run(batch)
            flops, num_bytes = self._costs.step(batch)
            self.clock.totals.tokens_computed += len(batch.token_ids_T)
            self.clock.totals.flops += flops
            self.clock.totals.bytes += num_bytes
            if any(sequence.request.prompt_logprobs is not None for sequence, _ in plan.chunks):
                self._record_prompt_logprobs(plan, hidden)
        drawing, logits = self._logits(plan, hidden)
        for sequence, count in plan.chunks:
            self.scheduler.computed(sequence, count)
        return self._draw(drawing, logits) if drawing else []

    def _logits(self, plan: StepPlan, hidden: torch.Tensor | None) -> tuple[list[Sequence], torch.Tensor]:
        """The sequences that draw a token in this step, and a row of logits for each."""
        drawing: list[Sequence] = []
        last_tokens: list[int] = []
        end = 0
        for sequence, count in plan.chunks:
            end += count
            if sequence.num_computed + count == len(sequence.token_ids):
                drawing.append(sequence)
                last_tokens.append(end - 1)
        if not drawing and not plan.starts:
            return drawing, torch.empty(0)
        prompts = [prompt for _, prompt in plan.starts]
        prompts += [s.request.shared_prompt for s in drawing if s.request.shared_prompt is not None]
        for prompt in prompts:
            if prompt.hidden is None and hidden is not None and prompt.leader in drawing:
                prompt.hidden = hidden[last_tokens[drawing.index(prompt.leader)]]
        kept = [prompt.hidden for _, prompt in plan.starts]
        return drawing + [sequence for sequence, _ in plan.starts], self.runner.logits(hidden, last_tokens, kept)

    def _draw(self, drawing: list[Sequence], logits: torch.Tensor) -> list[Sequence]:
        sampled = sample(logits, self.sampling.batch(drawing), self.decoder.team)
        broken = sampled.broken_R
        any_broken = bool(broken.any())
        now = time.time()
        finished = []
        version = self.version
        rows = zip(
            drawing,
            sampled.token_ids_R.tolist(),
            sampled.logprobs_R.tolist(),
            sampled.raw_logprobs_R.tolist(),
            strict=True,
        )
        for row, (sequence, token, logprob, raw) in enumerate(rows):
            if any_broken and broken[row]:
                sequence.finish_reason = "abort"
                sequence.error = f"the logits of output token {sequence.num_output} are not finite"
                finished.append(sequence)
                continue
            if not sequence.logprobs:
                sequence.t_first_token = now
            if not sequence.span_starts or sequence.span_starts[-1][0] != version:
                sequence.span_starts.append((version, len(sequence.logprobs)))
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.raw_logprobs.append(raw)
            if row in sampled.top:
                sequence.top_logprobs.append(sampled.top[row])
            sequence.finish_reason = finish_reason(sequence)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        self.clock.totals.output_tokens += len(drawing) - int(broken.sum())
        return finished

    def _record_prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        start = 0
        for sequence, count in plan.chunks:
            known = sequence.request.prompt_logprobs
            first = sequence.num_computed
            # Only what is new: a sample that computes the prompt again finds its logprobs already there.
            if known is not None and first + 1 <= len(known) < sequence.num_prompt:
                skip = len(known) - first - 1
                stop = min(first + count, sequence.num_prompt - 1)
                targets = np.array(sequence.token_ids[first + skip + 1 : stop + 1], np.int64)
                rows = hidden[start + skip : start + stop - first]
                if len(targets):
                    known.extend(self.runner.given_logprobs(rows, targets).tolist())
            start += count

    def _retire(self, finished: list[Sequence]) -> None:
        if not finished:
            return
        now = time.time()
        self.scheduler.finish(finished)
        for sequence in finished:
            sequence.t_finished = now
            self.clock.totals.finished += 1
            self.clock.totals.errors += sequence.error is not None
            if sequence.request.finished:
                self.requests.pop(sequence.request.request_id, None)

    def _count(self, plan: StepPlan) -> None:
        totals = self.clock.totals
        totals.steps += 1
        totals.live_batch_sum += len(self.scheduler.running)
        totals.slot_steps += self.scheduler.slots_held
        totals.slot_steps_used += len(plan.chunks) + len(plan.starts)
        totals.prefill_tokens_shared += plan.num_shared_tokens
        totals.preemptions += plan.num_preempted
        prefill = 0
        for sequence, count in plan.chunks:
            if not sequence.logprobs:
                prefill += count
            elif (missing := sequence.num_tokens - sequence.num_computed) > 1:
                totals.recomputed_tokens += min(count, missing - 1)
        totals.prefill_tokens_computed += prefill
        totals.prefill_steps += prefill > 0

    # Between two steps

    def update_weights(self, named: Any, version: int, *, kv: KvPolicy = "keep") -> None:
        """Stage, check and commit an iterable of (name, tensor)."""
        self.check_version(version)
        decoder = self.decoder
        self.commit(stage_tensors(named, decoder.specs, device=decoder.device, hold=decoder.hold), version, kv=kv)

    def check_version(self, version: int) -> None:
        if version <= self.version:
            raise WeightUpdateError(f"version {version} does not follow version {self.version}; nothing was changed")

    @torch.inference_mode()
    def commit(self, staged: StagedUpdate, version: int, *, kv: KvPolicy = "keep") -> float:
        """Copy a staged update in place, addresses unchanged; the seconds that took."""
        if kv not in ("keep", "recompute"):
            raise ValueError(f"kv is {kv!r}; it must be 'keep' or 'recompute'")
        self.check_version(version)
        started = time.perf_counter()
        for name, tensor in self.decoder.tensors.items():
            tensor.copy_(staged.tensors[name])
        known = self.decoder.lost_checksums
        known.update({name: staged.checksums[name] for name in known})
        self.version = version
        self.scheduler.change_version(version, recompute=kv == "recompute")
        seconds = time.perf_counter() - started
        self.clock.totals.updates += 1
        self.clock.totals.stall_seconds += seconds
        return seconds

    def weights_checksum(self) -> str:
        """Of the weights as they came: with quantization, not of what is left of them."""
        return model_checksum(self.decoder.tensors, self.decoder.specs, self.decoder.lost_checksums)

    def score(self, sequences: Items[np.ndarray]) -> list[np.ndarray]:
        """Raw logprob of each token after the first, given those before it, under the present weights."""
        scores: list[np.ndarray] = []
        part: list[np.ndarray] = []
        for sequence in sequences:
            if len(sequence) < 2:
                raise ValueError("a sequence to score needs at least two tokens")
            if part and sum(map(len, part)) + len(sequence) > self.config.max_tokens_per_step:
                scores += self.runner.score(part)
                part = []
            part.append(np.asarray(sequence, np.int64))
        return scores + (self.runner.score(part) if part else [])

    def stats(self) -> dict[str, float]:
        scheduler = self.scheduler
        num_blocks = scheduler.allocator.num_blocks
        return self.clock.snapshot(
            running=len(scheduler.running),
            waiting=sum(len(request.waiting) for request in scheduler.waiting),
            kv_usage=1 - scheduler.allocator.num_free / num_blocks,
            prefix_queries=scheduler.cache.queries,
            prefix_hits=scheduler.cache.hits,
            version=self.version,
        )


def _check_config(config: EngineConfig) -> None:
    for name in ("max_num_seqs", "kv_cache_tokens", "block_size", "max_tokens_per_step", "max_model_len"):
        value, least = getattr(config, name), 2 if name == "max_model_len" else 1
        if value is None and name == "max_model_len":
            continue
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}; it must be an integer >= {least}")
    if config.batching not in ("continuous", "static"):
        raise ConfigError(f"batching is {config.batching!r}; it must be 'continuous' or 'static'")
    if config.quantization not in (None, *get_args(Quantization)):
        offered = ", ".join(map(repr, get_args(Quantization)))
        raise ConfigError(f"quantization is {config.quantization!r}; it must be None or one of {offered}")
    if config.quantize_head and config.quantization is None:
        raise ConfigError("quantize_head is True, but quantization is None; set quantization = 'int8' too")
    if config.speculative is not None:
        raise ConfigError(f"speculative is {config.speculative!r}; this engine offers None alone")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        raise ConfigError(f"device is {config.device!r}; it must be 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but this machine or this build of torch has none")
