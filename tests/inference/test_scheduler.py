"""Scheduler, allocator and prefix cache: fixed vectors, then random histories with every invariant checked."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from inference.block_allocator import BlockAllocator
from inference.prefix_cache import PrefixCache
from inference.request import Request, Sequence
from inference.scheduler import Scheduler, StepPlan
from olmorl.contract.generation import SamplingParams


def make_request(number: int, prompt: list[int], *, n: int = 1, max_tokens: int = 8, priority: int = 0) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return Request(
        str(number),
        prompt,
        params,
        number,
        0,
        tuple(range(n)),
        stop_ids=frozenset(),
        max_tokens=len(prompt) + max_tokens,
        priority=priority,
    )


def make_scheduler(num_blocks: int = 64, **options: int) -> Scheduler:
    settings_ = {"block_size": 4, "max_num_seqs": 4, "max_tokens_per_step": 8, "prefix_caching": True} | options
    return Scheduler(num_blocks, **settings_)  # type: ignore[arg-type]


def advance(scheduler: Scheduler, plan: StepPlan, token: int = 1) -> list[Sequence]:
    """What the engine does with a plan, without a model; the finished sequences."""
    for sequence, count in plan.chunks:
        scheduler.computed(sequence, count)
    drawing = [s for s, _ in plan.chunks if s.num_computed == s.num_tokens] + [s for s, _ in plan.starts]
    for sequence in drawing:
        sequence.token_ids.append(token)
    finished = [s for s in drawing if s.num_tokens >= s.request.max_tokens] + plan.outgrown
    for sequence in finished:
        sequence.finish_reason = "length"
    scheduler.finish(finished)
    return finished


def check_blocks(scheduler: Scheduler, requests: list[Request]) -> None:
    """Every block is free or held, and its count is the number of tables and kept prompts that hold it."""
    held: Counter[int] = Counter()
    for request in requests:
        for sequence in request.sequences:
            held.update(sequence.blocks)
            assert (sequence.row >= 0) == (sequence in scheduler.running)
            if sequence.row < 0:
                assert not sequence.blocks
        if request.shared_prompt is not None:
            assert request.waiting
            held.update(request.shared_prompt.blocks)
    allocator = scheduler.allocator
    assert allocator.ref_counts == [held[block] for block in range(allocator.num_blocks)]
    assert allocator.num_free + len(held) == allocator.num_blocks
    rows = [sequence.row for sequence in scheduler.running]
    assert len(set(rows)) == len(rows) <= scheduler.max_num_seqs


def test_one_budget_running_before_waiting() -> None:
    scheduler = make_scheduler()
    for number in range(2):
        scheduler.add(make_request(number, [number + 1] * 2))
    advance(scheduler, scheduler.schedule())
    scheduler.add(make_request(2, [5] * 5))
    scheduler.add(make_request(3, [6] * 7))
    assert [count for _, count in scheduler_step(scheduler)] == [1, 1, 5, 1]
    assert [count for _, count in scheduler_step(scheduler)] == [1, 1, 1, 5]
    assert [count for _, count in scheduler_step(scheduler)] == [1, 1, 1, 1]


def scheduler_step(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    plan = scheduler.schedule()
    advance(scheduler, plan)
    return plan.chunks


def test_prefix_hit_leaves_the_last_token_to_compute() -> None:
    scheduler = make_scheduler(block_size=16, max_tokens_per_step=64)
    prompt = list(range(48))
    scheduler.add(make_request(0, prompt, max_tokens=1))
    assert [count for _, count in scheduler_step(scheduler)] == [48]
    scheduler.add(make_request(1, prompt, max_tokens=1))
    assert [count for _, count in scheduler_step(scheduler)] == [16]
    scheduler.change_version(1, recompute=False)
    scheduler.add(make_request(2, prompt, max_tokens=1))
    assert [count for _, count in scheduler_step(scheduler)] == [48]


def test_prefix_tokens_are_compared(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("inference.prefix_cache.chain_hash", lambda parent, tokens: b"the same for all")
    scheduler = make_scheduler()
    scheduler.add(make_request(0, [1] * 6, max_tokens=1))
    scheduler_step(scheduler)
    scheduler.add(make_request(1, [2] * 6, max_tokens=1))
    assert [count for _, count in scheduler_step(scheduler)] == [6]


def test_group_prompt_is_computed_once_and_late_samples_start_from_it() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_tokens_per_step=4)
    request = make_request(0, list(range(10)), n=5, max_tokens=3)
    scheduler.add(request)
    computed = started = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        computed += sum(count for s, count in plan.chunks if s.num_output == 0)
        started += len(plan.starts)
        check_blocks(scheduler, [request])
        advance(scheduler, plan)
    assert (computed, started) == (10, 4)
    assert scheduler.allocator.num_free == 64


def test_writers_of_a_shared_block_get_copies() -> None:
    scheduler = make_scheduler()
    request = make_request(0, [7] * 6, n=3)
    scheduler.add(request)
    scheduler_step(scheduler)
    plan = scheduler.schedule()
    assert len(plan.copies) == 2 and len({copy for _, copy in plan.copies}) == 2
    assert len({sequence.blocks[1] for sequence in request.sequences}) == 3
    assert len({sequence.blocks[0] for sequence in request.sequences}) == 1


def test_the_newest_is_preempted_and_nobody_admitted_in_that_step() -> None:
    scheduler = make_scheduler(num_blocks=6, max_tokens_per_step=64, prefix_caching=False)
    old, new, urgent = (
        make_request(number, [number] * 4, max_tokens=20, priority=-(number == 2)) for number in range(3)
    )
    scheduler.add(old)
    scheduler.add(new)
    while scheduler.allocator.num_free:
        advance(scheduler, scheduler.schedule())
    while all(sequence.num_tokens <= 12 for sequence in scheduler.running):
        advance(scheduler, scheduler.schedule())
    scheduler.add(urgent)  # first in line, and the blocks that the preemption frees would do for it
    plan = scheduler.schedule()
    assert plan.num_preempted == 1
    assert [sequence.request for sequence, _ in plan.chunks] == [old] and scheduler.running == old.sequences
    assert new.sequences[0].num_computed == 0 and new.waiting
    advance(scheduler, plan)
    assert urgent in [sequence.request for sequence, _ in scheduler.schedule().chunks]


def test_lower_priority_number_goes_first_and_is_preempted_last() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(0, [1, 2]))
    scheduler.add(make_request(1, [3, 4], priority=-1))
    assert scheduler.schedule().chunks[0][0].request.request_id == "1"


def test_reuse_order_of_free_blocks() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    assert blocks == [0, 1, 2]
    allocator.mark_cached(0)
    allocator.mark_cached(1)
    allocator.release([2, 1, 0])
    assert allocator.allocate(4) == [2, 3, 1, 0] and allocator.num_free == 0


def test_a_reused_block_is_forgotten() -> None:
    cache = PrefixCache(2, block_size=2)
    sequence = make_request(0, [1, 2, 3]).sequences[0]
    sequence.blocks = cache.allocator.allocate(2)
    sequence.num_computed = 3
    cache.publish(sequence)
    cache.allocator.release(reversed(sequence.blocks))
    assert cache.lookup([1, 2, 9]).blocks == [0]
    assert cache.allocator.allocate(2) == [1, 0]
    assert cache.lookup([1, 2, 9]).blocks == [] and len(cache) == 0


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


@settings(max_examples=150, deadline=None)
@given(events, st.integers(6, 20), st.sampled_from([1, 2, 4]), st.sampled_from([1, 5, 64]), st.booleans())
def test_random_histories(history, num_blocks, block_size, budget, prefix_caching) -> None:  # type: ignore[no-untyped-def]
    scheduler = make_scheduler(
        num_blocks, block_size=block_size, max_tokens_per_step=budget, prefix_caching=prefix_caching
    )
    requests: list[Request] = []
    version = 0
    written: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> (version, tokens before and in it) as computed

    def step() -> None:
        plan = scheduler.schedule()
        check_blocks(scheduler, requests)
        scheduled = {id(s) for s, _ in plan.chunks}
        assert len(scheduled) == len(plan.chunks) and sum(count for _, count in plan.chunks) <= budget
        assert all(s.row >= 0 for s, _ in plan.chunks if s not in plan.outgrown)
        for s, count in plan.chunks:
            assert len(s.blocks) * block_size >= s.num_computed + count
            for position in range(s.num_computed, s.num_computed + count):
                block = s.blocks[position // block_size]
                assert scheduler.allocator.ref_counts[block] == 1 or s.num_computed < s.num_prompt, "shared write"
                written[block] = (version, tuple(s.token_ids[: position + 1]))
        for source, target in plan.copies:
            written.setdefault(target, written[source])
        for s, _ in plan.chunks:  # what a sequence reads without computing it must be its own prefix
            for index in range(s.num_computed // block_size):
                _, tokens = written[s.blocks[index]]
                assert list(tokens) == s.token_ids[: len(tokens)]
                if s.publishable:
                    assert written[s.blocks[index]][0] == version
        advance(scheduler, plan, token=len(requests))
        check_blocks(scheduler, requests)

    for kind, a, b, priority in history:
        if kind == "add" and -(-a // block_size) <= num_blocks:
            prompt = [3] * (a // 2) + list(range(a - a // 2))  # many share beginnings
            requests.append(make_request(len(requests), prompt, n=b, max_tokens=6, priority=priority))
            scheduler.add(requests[-1])
        elif kind == "abort" and a < len(requests):
            unfinished = [s for s in requests[a].sequences if s.finish_reason is None]
            for sequence in unfinished:
                sequence.finish_reason = "abort"
            scheduler.finish(unfinished)
            check_blocks(scheduler, requests)
        elif kind == "update":
            version += 1
            scheduler.change_version(version, recompute=bool(a))
            check_blocks(scheduler, requests)
        elif kind == "step":
            step()
    for _ in range(3000):
        if not scheduler.has_work:
            break
        step()
    assert not scheduler.has_work, "every request ends"
    assert all(request.finished for request in requests)
    assert scheduler.allocator.num_free == num_blocks
