"""The loop of the engine as a library: schedule, run, sample, stop, once for each `step()`.

With `overlap` a step is launched before the tokens of the last one are read (`inference.flight`). Whatever looks at
sequences from outside, or changes weights, first waits for what is in flight; so do guesses at what comes next
(`inference.speculative`).

Single-threaded on purpose: whatever happens between two steps (weights, scores, aborts) is a plain method call, so a
torn weight or a half-built batch cannot exist.
"""

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from inference.engine_config import check_config
from inference.flight import Flight
from inference.followers import Followers, device_of
from inference.gpu_sampling import new_gpu_sampler
from inference.memory_plan import new_scheduler
from inference.model.architecture import read_architecture
from inference.model.load import eos_token_ids, load_decoder, resolve_folder
from inference.model.sharding import check_divisible
from inference.model.tensor_parallel import ALONE
from inference.prompt_logprobs import record_prompt_logprobs
from inference.request import Request, Sequence
from inference.runner import Runner, RunnerConfig
from inference.sampler import SamplingTable, has_penalty, sample
from inference.scheduler import StepPlan
from inference.speculative.source import new_speculation
from inference.staged_update import StagedUpdate, model_checksum, stage_tensors
from inference.stats import CostModel, StatsClock
from inference.step_batch import BlockTable
from inference.stopping import StopMatcher
from inference.token_ids import check_ids, to_score
from inference.tokenizer import Tokenizer
from olmorl.contract.errors import ConfigError, WeightUpdateError
from olmorl.contract.generation import EngineConfig, SamplingParams

KvPolicy = Literal["keep", "recompute"]


class Engine:
    def __init__(self, config: EngineConfig, *, initial_version: int = 0) -> None:
        check_config(config)
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.gpu_share < 1 and config.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(config.gpu_share)
        self.folder: Path = resolve_folder(config.model)
        self.followers = self._start_followers() if config.tensor_parallel_size > 1 else None
        self.decoder = load_decoder(
            self.folder,
            dtype=config.dtype,
            device=device_of(config, 0),
            max_model_len=config.max_model_len,
            kernels=config.kernels,
            ranks=ALONE if self.followers is None else self.followers.join(),
            quantization=config.quantization,
            quantize_head=config.quantize_head,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        if config.deterministic and self.decoder.compiled is None:
            raise ConfigError(
                "deterministic needs the compiled kernels: float32 on a CPU, heads of a multiple of 8, kernels 'auto'; "
                f"this is {config.dtype} on {config.device} with kernels = {config.kernels!r}"
            )
        self.max_model_len = config.max_model_len or self.decoder.arch.max_positions
        self.vocab_size = self.decoder.arch.vocab_size
        self.eos_ids = tuple(i for i in eos_token_ids(self.folder) if 0 <= i < self.vocab_size)
        self.tokenizer = Tokenizer(self.folder)
        self.version = initial_version
        self.rewriting = False
        """an update is being received into the weights themselves: until it is committed they are of no version"""
        self.scheduler = new_scheduler(self.decoder, config, max_model_len=self.max_model_len)
        self.scheduler.cache.version = self.version
        self.runner = self._new_runner()
        windowed = self.scheduler.num_window_blocks is not None
        self.table = BlockTable(config.max_num_seqs, block_size=config.block_size, windowed=windowed)
        self.sampling = SamplingTable(config.max_num_seqs)
        self.gpu_sampler = new_gpu_sampler(self.decoder)
        self.requests: dict[str, Request] = {}
        self.num_arrived = 0
        self._depth = int(self._on_gpu if config.overlap is None else config.overlap)
        """steps that may be in flight when `step` returns"""
        self._flights: deque[Flight] = deque()
        self._finished: list[Sequence] = []
        """for the next `step` to return"""
        self.clock = StatsClock()
        self.speculation = new_speculation(config, self.runner, totals=self.clock.totals)
        self._costs = CostModel(
            replace(self.decoder.arch, num_kv_heads=self.decoder.local.num_kv_heads * config.tensor_parallel_size),
            num_parameters=self.decoder.num_resident_parameters,
            element_size=self.decoder.embedding.element_size(),
            weight_bytes=None if config.quantization is None else self.decoder.streamed_bytes,
            head_bytes=None if config.quantization is None else self.decoder.head.nbytes,
            kv_head_bytes=self.decoder.kv_head_bytes,
        )

    def _start_followers(self) -> Followers:
        check_divisible(read_architecture(self.folder), self.config.tensor_parallel_size)
        return Followers(self.config)

    def _new_runner(self) -> Runner:
        config = self.config
        runner = RunnerConfig(
            num_blocks=self.scheduler.allocator.num_blocks,
            block_size=config.block_size,
            num_window_blocks=self.scheduler.num_window_blocks,
            graphs=self._on_gpu if config.cuda_graphs is None else config.cuda_graphs,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
        )
        if self.followers is None:
            return Runner(self.decoder, runner)
        self.followers.start(runner)
        return Runner(self.decoder, runner, tell=self.followers.tell)

    @property
    def _on_gpu(self) -> bool:
        return self.decoder.device.type == "cuda"

    # Requests

    @property
    def max_prompt_tokens(self) -> int:
        return min(self.max_model_len - 1, self.scheduler.allocator.num_blocks * self.config.block_size)

    def check(self, prompt: Items[int], params: SamplingParams) -> None:
        """Raises ValueError for a request that can never run. Looks at nothing that changes: call it anywhere."""
        length, limit = len(prompt), self.max_model_len
        if length == 0:
            raise ValueError("the prompt is empty; give at least one token id")
        if length >= limit:
            raise ValueError(f"the prompt has {length} tokens; it must be shorter than max_model_len = {limit}")
        check_ids(min(prompt), max(prompt), vocab_size=self.vocab_size)
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
        # Where the device counts tokens for penalties, it counts what it draws: nothing may be drawn in vain there.
        if self.gpu_sampler is None or not has_penalty(params):
            self.speculation.open(request)
        return request

    def abort(self, request_id: str) -> list[Sequence]:
        """The samples of the request that were not finished, with what they had. Empty for an unknown id."""
        self._land(0)
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
        return bool(self.requests or self._finished)

    # One step

    def step(self) -> list[Sequence]:
        """Compute and draw once; the samples that are known to have finished since the last step."""
        if self.scheduler.has_work:
            assert not self.rewriting, "a step was asked for while the weights are being rewritten"
            self.clock.begin_step()
            self.speculation.propose(self.scheduler.running)
            plan = self.scheduler.schedule()
            self.table.update(entered=plan.entered, grown=plan.grown)
            for sequence in plan.entered:
                self.sampling.set(sequence)
            self.runner.copy_blocks(plan.copies, plan.window_copies)
            self.speculation.complete(plan, self.table, self.sampling)
            guessed = any(sequence.draft for sequence, _ in plan.chunks)
            drew = self._compute(plan) if plan.chunks or plan.starts else False
            self._land(self._depth if drew and not guessed else 0)  # how far guesses go, the next step must know
            self._give_up(plan.outgrown)
            if not self.scheduler.has_work or self.speculation.applies(len(self.scheduler.running)):
                self._land(0)  # all have stopped and nobody waits for these, or guesses are about to be made
            self.clock.end_step()
        finished, self._finished = self._finished, []
        return finished

    def _land(self, depth: int) -> None:
        """Read what was drawn until no more than `depth` steps are in flight."""
        while len(self._flights) > depth:
            landed = self._flights.popleft().land()
            self.clock.totals.output_tokens += landed.num_tokens
            self.clock.totals.slot_steps_used -= landed.num_wasted
            for draft in landed.verified:
                self.speculation.observe(draft.sequence, draft.drafted, draft.accepted)
                self.scheduler.computed(draft.sequence, draft.accepted)
                self.clock.totals.judged(draft.drafted, draft.accepted)
            self._finished += landed.finished
            self._retire(landed.finished)

    def _give_up(self, outgrown: list[Sequence]) -> None:
        given_up = [sequence for sequence in outgrown if sequence.finish_reason is None]
        for sequence in given_up:
            sequence.finish_reason = "abort"
            sequence.error = (
                f"{sequence.num_tokens} tokens outgrew the KV pool alone; raise kv_cache_tokens or lower max_tokens"
            )
        self._finished += given_up
        self._retire(given_up)

    def _compute(self, plan: StepPlan) -> bool:
        """Compute and draw; whether any token was drawn."""
        hidden = None
        rows_before = self.runner.logit_rows
        drawn_ids = self._flights[-1].token_ids_R if self._flights else None
        self.clock.totals.count(plan, running=len(self.scheduler.running), slots_held=self.scheduler.slots_held)
        if plan.chunks:
            batch = self.table.batch(plan.chunks)
            hidden = self.runner.run(batch, drawn_ids)
            self.clock.totals.tokens_computed += len(batch.token_ids_T)
            self.clock.totals.spend(self._costs.body(batch))
            record_prompt_logprobs(plan, hidden, self.runner)
        drawing, logits = self._logits(plan, hidden)
        rows = self.runner.logit_rows - rows_before
        self.clock.totals.logit_rows += rows
        self.clock.totals.spend(self._costs.head(rows))
        for sequence, count in plan.chunks:
            self.scheduler.computed(sequence, count - len(sequence.draft))
        if drawing:
            sampled = sample(logits, self.sampling.batch(drawing, drawn_ids), self.decoder.team, self.gpu_sampler)
            self._flights.append(Flight(drawing, sampled, self.version))
        return bool(drawing)

    def _logits(self, plan: StepPlan, hidden: torch.Tensor | None) -> tuple[list[Sequence], torch.Tensor]:
        """The sequences that draw in this step; a row of logits for each, and for each token of its draft."""
        drawing: list[Sequence] = []
        last_tokens: list[int] = []
        rows: list[int] = []
        end = 0
        for sequence, count in plan.chunks:
            end += count
            if sequence.num_computed + count == sequence.num_tokens + len(sequence.draft):
                drawing.append(sequence)
                last_tokens.append(end - 1)
                rows += range(end - 1 - len(sequence.draft), end)
        if not drawing and not plan.starts:
            return drawing, torch.empty(0)
        prompts = [prompt for _, prompt in plan.starts]
        prompts += [s.request.shared_prompt for s in drawing if s.request.shared_prompt is not None]
        for prompt in prompts:
            if prompt.hidden is None and hidden is not None and prompt.leader in drawing:
                prompt.hidden = hidden[last_tokens[drawing.index(prompt.leader)]].clone()
        kept = [prompt.hidden for _, prompt in plan.starts]
        return drawing + [sequence for sequence, _ in plan.starts], self.runner.logits(hidden, rows, kept)

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
                known = self.requests.pop(sequence.request.request_id, None)
                if known is not None and sequence.drafting is not None:
                    self.speculation.close(known)

    # Between two steps

    def update_weights(self, named: Any, version: int, *, kv: KvPolicy = "keep") -> None:
        """Stage, check and commit an iterable of (name, tensor)."""
        self.check_version(version)
        decoder = self.decoder
        staged = stage_tensors(named, decoder.specs, device=decoder.device, hold=decoder.hold)
        self.share(staged)
        self.commit(staged, version, kv=kv)

    def share(self, staged: StagedUpdate) -> None:
        """Bring a staged update to the other ranks, before its commit. From any thread, while steps go on."""
        if self.followers is not None:
            self.followers.stage(staged.tensors, self.decoder)

    def check_version(self, version: int) -> None:
        if not isinstance(version, (int, np.integer)) or version <= self.version:
            raise WeightUpdateError(f"version {version} does not follow version {self.version}; nothing was changed")

    @torch.inference_mode()
    def commit(self, staged: StagedUpdate, version: int, *, kv: KvPolicy = "keep") -> float:
        """Copy a staged update into the weights, addresses unchanged; the seconds that took."""
        if kv not in ("keep", "recompute"):
            raise ValueError(f"kv is {kv!r}; it must be 'keep' or 'recompute'")
        self.check_version(version)
        started = time.perf_counter()
        self._land(0)
        if self.followers is not None:
            self.followers.tell("commit")
        decoder = self.decoder
        if not staged.in_place:
            for name, tensor in decoder.tensors.items():
                tensor.copy_(decoder.part(name, staged.tensors[name]))
        known = decoder.lost_checksums
        known.update({name: staged.checksums[name] for name in known})
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)  # who sent may now write what was copied from
        self.rewriting = False
        self.version = version
        self.scheduler.change_version(version, recompute=kv == "recompute")
        seconds = time.perf_counter() - started
        self.clock.totals.updates += 1
        self.clock.totals.stall_seconds += seconds
        return seconds

    def weights_checksum(self) -> str:
        """Of the weights as they came: with quantization, not of what is left of them."""
        return model_checksum(self.whole_weights(), self.decoder.specs, self.decoder.lost_checksums)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Of all ranks together, as they are stored, by their names in the checkpoint."""
        if self.followers is not None:
            self.followers.tell("collect")
        return self.decoder.whole_tensors()

    def score(self, sequences: Items[np.ndarray]) -> list[np.ndarray]:
        """Raw logprob of each token after the first, given those before it, under the present weights."""
        if self.rewriting:
            raise WeightUpdateError("the weights are being rewritten: there are none to score with")
        checked = [to_score(ids, max_length=self.max_model_len, vocab_size=self.vocab_size) for ids in sequences]
        scores: list[np.ndarray] = []
        part: list[np.ndarray] = []
        for sequence in checked:
            if part and sum(map(len, part)) + len(sequence) > self.config.max_tokens_per_step:
                scores += self.runner.score(part)
                part = []
            part.append(sequence)
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
