"""Which tokens of which sequences the next step computes.

There are no prefill and decode phases: every running sequence asks for `num_tokens - num_computed` tokens out of one
budget, then waiting requests do. When blocks run out, the newest sequence gives its own back and is recomputed later.
The prompt of a request is computed once; its other samples begin from the shared blocks. What somebody guesses to come
next (`Sequence.draft`) is computed too, as far as nobody else needs the tokens or the blocks.

Where tokens are read one step late (`Sequence.in_flight`), a step is planned before those of the last one are known:
whoever may still run on does. One that turns out to have stopped has used a slot for nothing, and that is all.

Static batching is the same policy with one difference: the row of a finished sequence stays empty until the whole
batch of `max_num_seqs` sequences is done. It is there to be compared with. No torch here.
"""

from bisect import insort
from dataclasses import dataclass, field

from inference import lookahead
from inference.kv_blocks import KVBlocks, window_pool_blocks
from inference.prefix_cache import Hit
from inference.request import Request, Sequence, SharedPrompt


@dataclass(slots=True)
class StepPlan:
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """how many tokens of which sequence to compute"""
    starts: list[tuple[Sequence, SharedPrompt]] = field(default_factory=list)
    """samples that draw their first token from a prompt somebody else computed"""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """blocks to copy before anything is written: (from, to)"""
    window_copies: list[tuple[int, int]] = field(default_factory=list)
    """the same in the pool of the sliding layers"""
    entered: list[Sequence] = field(default_factory=list)
    """sequences that were given a row"""
    grown: list[Sequence] = field(default_factory=list)
    """sequences whose block table changed from the block of their next token on"""
    outgrown: list[Sequence] = field(default_factory=list)
    """sequences that need more than the whole pool; they can only be given up"""
    computing: set[bytes] = field(default_factory=set)
    """keys of the prompts' blocks that are being filled: the prefix cache will have them"""
    num_tokens: int = 0
    num_shared_tokens: int = 0
    """prompt tokens of new samples that nobody computes again: a group mate or the prefix cache has them"""
    num_preempted: int = 0


class Scheduler:
    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int,
        max_num_seqs: int,
        max_tokens_per_step: int,
        prefix_caching: bool,
        static: bool = False,
        window: int | None = None,
        max_draft: int = 0,
    ) -> None:
        """`window`: what sliding layers see, if the model has such layers. `max_draft`: tokens of a draft."""
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.prefix_caching = prefix_caching
        self.static = static
        self.num_window_blocks: int | None = None
        if window is not None:
            self.num_window_blocks = window_pool_blocks(
                window,
                block_size=block_size,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_tokens_per_step=max_tokens_per_step,
                max_draft=max_draft,
            )
        self.kv = KVBlocks(
            num_blocks, block_size=block_size, window=window, num_window_blocks=self.num_window_blocks or 0
        )
        self.cache = self.kv.cache
        self.allocator = self.kv.allocator
        self.running: list[Sequence] = []
        """best first: the last one is given up first"""
        self.waiting: list[Request] = []
        """best first; a request stays here while one of its samples waits"""
        self.num_admitted = 0
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._spent_rows: list[int] = []
        """rows of a static batch whose sequences are finished"""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def slots_held(self) -> int:
        """Slots that count in this step, used or not: all while work waits, else those of the batch."""
        return self.max_num_seqs if self.waiting else self.max_num_seqs - len(self.free_rows)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_request_rank)

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        self._continue_running(plan)
        if not plan.num_preempted:
            self._admit_waiting(plan)
            if not self.running and self.waiting:  # nobody will give blocks back: prompts kept for later hold them
                self._drop_shared_prompts()
                self._admit_waiting(plan)
                if not plan.chunks:  # preempted when it filled the pool, and has drawn one token more by then
                    self._give_up_first(plan)
        return plan

    def steps_until_change(self) -> int:
        """How many of the next steps only decode one token of each sequence that runs now, as if by `lookahead`."""
        return lookahead.steps_until_change(self)

    def computed(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens of `sequence` have their KV in the pool."""
        sequence.num_computed += count
        if self.prefix_caching and sequence.publishable:
            full = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
            if full > len(sequence.block_hashes):
                self.cache.publish(sequence)
        self.kv.slide(sequence)

    def finish(self, sequences: list[Sequence]) -> None:
        """These are done, or given up: their rows and blocks are free again."""
        for sequence in sequences:
            request = sequence.request
            if sequence.row >= 0:
                (self._spent_rows if self.static else self.free_rows).append(sequence.row)
                sequence.row = -1
                self.kv.release(sequence)
            else:
                request.waiting.remove(sequence)
            if request.leader is sequence:
                request.leader = None
            if not request.waiting:
                self._drop_shared_prompt(request)
        self.running = [sequence for sequence in self.running if sequence.row >= 0]
        if any(not sequence.request.waiting for sequence in sequences):
            self.waiting = [request for request in self.waiting if request.waiting]
        if not self.running:
            self.free_rows += self._spent_rows
            self._spent_rows = []

    def change_version(self, version: int, *, recompute: bool) -> None:
        """New weights are in place: kept blocks are of mixed versions from here on, or all are computed again."""
        self.cache.version = version
        self._drop_shared_prompts()
        if recompute:
            while self.running:
                self._preempt_newest()
        for sequence in self.running:
            sequence.publishable = False
            sequence.kv_events.append((sequence.num_computed, version, "swap"))

    # Running sequences

    def _continue_running(self, plan: StepPlan) -> None:
        budget = self.max_tokens_per_step
        drafts = any(sequence.draft for sequence in self.running)
        spare = budget - sum(s.num_tokens - s.num_computed for s in self.running) if drafts else 0
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            computed, length = sequence.num_computed, sequence.num_tokens
            if sequence.draft:
                spare -= self._shorten_draft(sequence, spare)
            count = min(length - computed + len(sequence.draft), budget)
            ends = length >= sequence.max_tokens  # its last token is in flight
            if not ends and (self.kv.fits(sequence, computed + count) or self._grow(sequence, computed + count, plan)):
                self._compute(sequence, count, plan)
                budget -= count
                if sequence.request.leader is sequence:
                    self._lead(sequence, computed + count)
            index += 1
        plan.num_tokens = self.max_tokens_per_step - budget

    def _shorten_draft(self, sequence: Sequence, most: int) -> int:
        """To `most` tokens, and to the blocks it has where new ones would leave too few for all; its length then."""
        length = max(0, min(len(sequence.draft), most))
        missing = self.kv.count(sequence.num_tokens + length) - len(sequence.blocks)
        if missing > 0 and not self.has_room(missing):
            length = max(0, min(length, len(sequence.blocks) * self.block_size - sequence.num_tokens))
        del sequence.draft[length:]
        return length

    def _grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks to write up to `num_tokens`, preempting others if needed. False: `sequence` itself had to go."""
        while not self.kv.grow(sequence, num_tokens, plan.copies, plan.window_copies):
            if self._drop_shared_prompts():
                continue
            if self.running == [sequence]:
                plan.outgrown.append(sequence)
                return False
            plan.num_preempted += 1
            if self._preempt_newest() is sequence:
                return False
        plan.grown.append(sequence)
        return True

    def _preempt_newest(self) -> Sequence:
        sequence = self.running.pop()
        request = sequence.request
        self.free_rows.append(sequence.row)
        sequence.row = -1
        sequence.draft = []
        self.kv.release(sequence)
        if request.leader is sequence:
            request.leader = None
        if not request.waiting:
            insort(self.waiting, request, key=_request_rank)
        request.waiting.appendleft(sequence)
        return sequence

    # Waiting requests

    def _give_up_first(self, plan: StepPlan) -> None:
        sequence = self.waiting[0].waiting[0]
        needed = self.kv.count(sequence.num_tokens)
        assert needed > self.allocator.num_blocks, "an idle engine must be able to admit whatever fits its pool"
        plan.outgrown.append(sequence)

    def _admit_waiting(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.waiting) and self.free_rows:
            request = self.waiting[index]
            while request.waiting and self.free_rows and request.leader is None:
                sequence = request.waiting[0]
                if request.shared_prompt is not None and sequence.num_output == 0:
                    if not self._start(sequence, request.shared_prompt, plan):
                        return
                    continue
                if plan.num_tokens == self.max_tokens_per_step or not self.has_room(1):
                    return
                hit = self.find_prefix(sequence)
                if self._is_computed_elsewhere(sequence, hit, plan):
                    break
                if not self.has_room_for(sequence, hit):
                    return
                self._admit(sequence, hit, plan)
            if request.waiting:
                index += 1  # somebody is still computing its prompt; those behind need not wait for that
            else:
                self._drop_shared_prompt(request)
                del self.waiting[index]

    def _start(self, sequence: Sequence, prompt: SharedPrompt, plan: StepPlan) -> bool:
        if not self.has_room(1):
            return False
        self.kv.start(sequence, prompt)
        sequence.publishable = prompt.publishable
        sequence.kv_events = list(prompt.kv_events)
        self._enter(sequence, plan)
        plan.starts.append((sequence, prompt))
        plan.num_shared_tokens += sequence.num_prompt
        return True

    def _admit(self, sequence: Sequence, hit: Hit, plan: StepPlan) -> None:
        budget = self.max_tokens_per_step - plan.num_tokens
        self.kv.adopt(sequence, hit)
        self.cache.count(sequence.token_ids, hit)
        fresh = sequence.num_output == 0
        sequence.publishable = True
        if fresh:
            sequence.kv_events = [(0, self.cache.version, "prefill")]  # whatever was computed before is gone
        else:
            sequence.kv_events.append((sequence.num_tokens, self.cache.version, "recompute"))
        self._enter(sequence, plan)
        count = min(sequence.num_tokens - sequence.num_computed, budget)
        grown = self._grow(sequence, sequence.num_computed + count, plan)
        assert grown and not plan.num_preempted, "room was checked"
        self._compute(sequence, count, plan)
        plan.num_tokens += count
        if fresh:
            plan.num_shared_tokens += sequence.num_computed
            sequence.request.num_cached = sequence.num_computed
            sequence.request.leader = sequence
            self._lead(sequence, sequence.num_computed + count)

    def _compute(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        plan.chunks.append((sequence, count))
        if self.prefix_caching and sequence.publishable and sequence.num_computed < sequence.num_prompt:
            key = self.cache.next_key(sequence.token_ids, sequence.block_hashes)
            plan.computing.update(() if key is None else (key,))

    def _lead(self, sequence: Sequence, num_computed: int) -> None:
        """`sequence` is its request's leader; once the whole prompt is scheduled, the other samples may start."""
        if num_computed < sequence.num_prompt:
            return
        request = sequence.request
        request.leader = None
        if request.waiting:
            request.shared_prompt = self.kv.keep_prompt(sequence)

    def _enter(self, sequence: Sequence, plan: StepPlan) -> None:
        sequence.request.waiting.popleft()
        sequence.row = self.free_rows.pop()
        self.num_admitted += 1
        sequence.order = self.num_admitted
        insort(self.running, sequence, key=_running_rank)
        plan.entered.append(sequence)

    def find_prefix(self, sequence: Sequence) -> Hit:
        """What the prefix cache has for `sequence`. Prompt logprobs need every position computed."""
        return self.cache.lookup(sequence.token_ids) if self._may_hit(sequence) else Hit()

    def _may_hit(self, sequence: Sequence) -> bool:
        wants_all = sequence.num_output == 0 and sequence.request.params.prompt_logprobs
        return self.prefix_caching and not wants_all

    def _is_computed_elsewhere(self, sequence: Sequence, hit: Hit, plan: StepPlan) -> bool:
        """Whether this step fills the block behind `hit` for somebody else: from the next one on the cache has it."""
        return self._may_hit(sequence) and self.cache.next_key(sequence.token_ids, hit.hashes) in plan.computing

    def has_room_for(self, sequence: Sequence, hit: Hit, *, taken: int = 0) -> bool:
        """Room for all its tokens, `taken` blocks being spoken for. A hit that nobody holds is a free block less."""
        revived = sum(self.allocator.ref_counts[block] == 0 for block in hit.blocks)
        return self.has_room(taken + self.kv.count(sequence.num_tokens) - len(hit.blocks) + revived)

    def has_room(self, num_blocks: int) -> bool:
        """Room by live blocks, not by the longest possible output: each running sequence keeps one to grow into."""
        return self.allocator.num_free - num_blocks >= len(self.running)

    # Prompts kept for samples that have not begun

    def _drop_shared_prompt(self, request: Request) -> bool:
        prompt = request.shared_prompt
        if prompt is None:
            return False
        self.kv.drop_prompt(prompt)
        request.shared_prompt = None
        return True

    def _drop_shared_prompts(self) -> bool:
        """Whoever comes first will compute it again."""
        dropped = [request for request in self.waiting if self._drop_shared_prompt(request)]
        return bool(dropped)


def _request_rank(request: Request) -> tuple[int, int]:
    return (request.priority, request.arrival)


def _running_rank(sequence: Sequence) -> tuple[int, int]:
    return (sequence.request.priority, sequence.order)
