"""Random histories of add, fork, abort, preempt, finish and update, with every invariant of blocks checked.

The model is replaced by a ledger of what each block holds: the tokens it was computed from and the version that
computed it. What a sequence reads without computing it must be its own prefix, and of one version if it is published.
"""

import random
from collections.abc import Callable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference import lookahead
from inference.request import Sequence
from inference.scheduler import StepPlan

MakePolicy = Callable[..., Any]
Ledger = dict[int, tuple[int, tuple[int, ...]]]
Event = tuple[str, Any, int, int]

events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 5), st.integers(-1, 1)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("update"), st.booleans(), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=60,
)
options = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 20),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_tokens_per_step": st.sampled_from([1, 5, 64]),
        "prefix_caching": st.booleans(),
        "static": st.booleans(),
        "window": st.sampled_from([None, None, 1, 3, 6, 9]),
    }
)


class History:
    def __init__(self, policy: Any, *, max_draft: int = 0) -> None:
        self.policy = policy
        self.max_draft = max_draft
        self.dice = random.Random(0)
        self.scheduler = policy.scheduler
        self.version = 0
        self.written: Ledger = {}
        self.written_window: Ledger = {}

    def play(self, history: list[Event]) -> None:
        for event in history:
            self.apply(event)
        self.run_out(self.step)

    def apply(self, event: Event) -> None:
        kind, a, b, priority = event
        requests = self.policy.requests
        if kind == "add" and self.scheduler.kv.count(a) <= self.scheduler.allocator.num_blocks:
            prompt = [3] * (a // 2) + list(range(a - a // 2))  # many share beginnings
            self.policy.add(prompt, n=b, max_tokens=6, priority=priority)
        elif kind == "abort" and a < len(requests):
            self.policy.abort(requests[a])
        elif kind == "update":
            self.version += 1
            self.scheduler.change_version(self.version, recompute=bool(a))
        elif kind == "step":
            self.step()
        self.policy.check()

    def run_out(self, step: Callable[[], Any]) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            step()
        assert not self.scheduler.has_work, "every request ends"
        assert all(request.finished for request in self.policy.requests)
        self.policy.check()
        assert self.scheduler.allocator.num_free == self.scheduler.allocator.num_blocks
        assert len(self.scheduler.free_rows) == self.scheduler.max_num_seqs

    def propose(self, token: int) -> None:
        """Drafts whose first tokens are right, down to none of them."""
        for s in self.scheduler.running:
            length = min(self.dice.randint(0, self.max_draft), s.max_tokens - s.num_tokens - 1)
            if length > 0 and s.num_output and s.num_tokens - s.num_computed == 1:
                right = self.dice.randint(0, length)
                s.draft = [token] * right + [-1] * (length - right)

    def step(self) -> StepPlan:
        self.propose(len(self.policy.requests))
        wanted = {id(s): s.num_tokens - s.num_computed for s in self.scheduler.running}
        plan: StepPlan = self.scheduler.schedule()
        self.policy.check()
        if any(s.draft for s, _ in plan.chunks) and not plan.num_preempted and not plan.outgrown:
            given = {id(s): count - len(s.draft) for s, count in plan.chunks}
            assert all(given[s] == count for s, count in wanted.items()), "a draft took from somebody"
        scheduled = {id(s) for s, _ in plan.chunks}
        assert len(scheduled) == len(plan.chunks)
        assert sum(count for _, count in plan.chunks) <= self.scheduler.max_tokens_per_step
        assert not (plan.num_preempted and plan.entered), "nobody is admitted in a step that preempted"
        self._write(plan)
        for sequence, _ in plan.chunks:
            self._read(sequence)
        self.policy.advance(plan, token=len(self.policy.requests))
        self.policy.check()
        return plan

    def _write(self, plan: StepPlan) -> None:
        for copies, ledger in ((plan.copies, self.written), (plan.window_copies, self.written_window)):
            for source, target in copies:
                ledger[target] = ledger[source]
        size = self.scheduler.block_size
        for s, count in plan.chunks:
            for position in range(s.num_computed, s.num_computed + count):
                index = position // size
                entry = (self.version, tuple((s.token_ids + s.draft)[: position + 1]))
                self._write_one(s, self.scheduler.allocator, s.blocks[index], entry, self.written)
                windows = self.scheduler.kv.window_allocator
                if windows is not None:
                    self._write_one(s, windows, s.window_blocks[index], entry, self.written_window)

    def _write_one(self, s: Sequence, allocator: Any, block: int, entry: Any, ledger: Ledger) -> None:
        # Group mates that start in this very step hold the last prompt block while it is written for them too.
        assert allocator.ref_counts[block] == 1 or s.num_computed < s.num_prompt, "a write into a shared block"
        ledger[block] = entry

    def _read(self, s: Sequence) -> None:
        size, window = self.scheduler.block_size, self.scheduler.kv.window
        for index in range(s.num_computed // size):
            tables = [(s.blocks[index], self.written)]
            if window is not None and (index + 1) * size > s.num_computed - window + 1:
                tables.append((s.window_blocks[index], self.written_window))
            for block, ledger in tables:
                assert block >= 0
                version, tokens = ledger[block]
                assert list(tokens) == s.token_ids[: len(tokens)] and len(tokens) >= (index + 1) * size
                if s.publishable:
                    assert version == self.version


@settings(max_examples=200, deadline=None)
@given(events, options)
def test_random_histories(make_policy: MakePolicy, history: list[Event], options: Any) -> None:
    History(make_policy(**options)).play(history)


@settings(max_examples=150, deadline=None)
@given(events, options, st.sampled_from([1, 3, 6]))
def test_random_histories_with_drafts(
    make_policy: MakePolicy, history: list[Event], options: Any, max_draft: int
) -> None:
    """What was refused is written over, and never read or published; drafts take from nobody."""
    History(make_policy(**options, max_draft=max_draft), max_draft=max_draft).play(history)


def only_decodes(plan: StepPlan, before: list[Sequence]) -> bool:
    others = plan.starts or plan.entered or plan.outgrown or plan.num_preempted
    return bool(before) and not others and plan.chunks == [(sequence, 1) for sequence in before]


@settings(max_examples=200, deadline=None)
@given(events, options)
def test_steps_until_change_is_what_stepping_shows(make_policy: MakePolicy, history: list[Event], options: Any) -> None:
    driver = History(make_policy(**options))
    scheduler = driver.scheduler
    expected: int | None = None  # by the step before, if nothing came between

    def step() -> None:
        nonlocal expected
        before = list(scheduler.running)
        draw = all(s.num_tokens - s.num_computed == 1 for s in before)
        ahead = scheduler.steps_until_change()
        cautious = scheduler.prefix_caching and bool(scheduler.waiting and scheduler.free_rows)
        cautious |= any(r.leader is not None or r.shared_prompt is not None for r in scheduler.waiting)
        plan = driver.step()
        ended = any(sequence.row < 0 for sequence in before)
        if ahead:
            assert only_decodes(plan, before) and not (ended and ahead > 1), "promised too much"
        elif not cautious:
            assert not (draw and only_decodes(plan, before)), "promised too little"
        assert expected is None or ahead == expected or (cautious and ahead > expected)
        expected = None if ended or not ahead else ahead - 1

    for event in history:
        if event[0] == "step":
            step()
        else:
            expected = None
            driver.apply(event)
    driver.run_out(step)


@settings(max_examples=100, deadline=None)
@given(events, options)
@example(  # a cached block is taken by one sequence, and what it held computed anew by another
    history=[("add", 1, 5, 0), ("add", 1, 5, 0)],
    options={
        "num_blocks": 6,
        "block_size": 2,
        "max_tokens_per_step": 5,
        "prefix_caching": True,
        "static": True,
        "window": None,
    },
)
def test_a_leap_equals_the_steps_it_leaps_over(make_policy: MakePolicy, history: list[Event], options: Any) -> None:
    walker, leaper = History(make_policy(**options)), History(make_policy(**options))

    def state(driver: History) -> Any:
        sequences = [sequence for request in driver.policy.requests for sequence in request.sequences]
        return [(s.token_ids, s.num_computed, len(s.blocks), s.num_slid, s.row, s.finish_reason) for s in sequences]

    def leap() -> None:
        token = len(leaper.policy.requests)
        ahead = leaper.scheduler.steps_until_change() - 1  # the last of them may end a sequence
        for _ in range(ahead):
            walker.policy.step(token)
        if ahead > 0:
            lookahead.leap(leaper.scheduler, ahead, token=token)
        for driver in (walker, leaper):
            driver.policy.step(token)
            driver.policy.check()
        assert state(walker) == state(leaper)

    for event in history:
        if event[0] == "step":
            leap()
        else:
            walker.apply(event)
            leaper.apply(event)
    while leaper.scheduler.has_work:
        leap()
