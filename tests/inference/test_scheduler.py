"""Scheduler, allocator and prefix cache on fixed vectors."""

from collections.abc import Callable
from typing import Any

import pytest

from inference.block_allocator import BlockAllocator
from inference.kv_blocks import window_pool_blocks
from inference.prefix_cache import PrefixCache

MakePolicy = Callable[..., Any]


def test_one_budget_running_before_waiting(make_policy: MakePolicy) -> None:
    policy = make_policy()
    for number in range(2):
        policy.add([number + 1] * 2)
    policy.step()
    policy.add([5] * 5)
    policy.add([6] * 7)
    assert [policy.step() for _ in range(3)] == [[1, 1, 5, 1], [1, 1, 1, 5], [1, 1, 1, 1]]


def test_prefix_hit_leaves_the_last_token_to_compute(make_policy: MakePolicy) -> None:
    policy = make_policy(block_size=16, max_tokens_per_step=64)
    prompt = list(range(48))
    for expected in (48, 16):
        policy.add(prompt, max_tokens=1)
        assert policy.step() == [expected]
    policy.scheduler.change_version(1, recompute=False)
    policy.add(prompt, max_tokens=1)
    assert policy.step() == [48]


def test_requests_with_one_prompt_that_come_together_compute_it_once(make_policy: MakePolicy) -> None:
    policy = make_policy(block_size=4, max_num_seqs=8, max_tokens_per_step=16)
    prompt = list(range(30))
    requests = [policy.add(prompt), policy.add(prompt), policy.add([*prompt[:9], 77, 78, 79])]
    stranger = policy.add([50, 51, 52])
    assert [policy.step() for _ in range(3)] == [[16], [14, 2], [1, 2, 2, 3]], (
        "the second of them waits, others pass it"
    )
    policy.check()
    assert [request.num_cached for request in requests] == [0, 28, 8] and stranger.sequences[0].num_computed == 3


def test_nobody_waits_for_a_prefix_that_the_cache_will_not_have(make_policy: MakePolicy) -> None:
    prompt = list(range(10))
    for options, changed in (({"prefix_caching": False}, False), ({}, True)):
        policy = make_policy(block_size=4, max_num_seqs=8, max_tokens_per_step=16, **options)
        if changed:  # the blocks of the first are of two versions by the time the second comes
            policy.add([*prompt, *range(20, 40)])
            policy.step()
            policy.scheduler.change_version(1, recompute=False)
            policy.add([*prompt, *range(20, 40)], max_tokens=1)
            assert policy.step() == [14, 2]
        else:
            policy.add(prompt)
            policy.add(prompt)
            assert policy.step() == [10, 6]


def test_prefix_vector_and_the_order_in_which_blocks_are_free_again(make_policy: MakePolicy) -> None:
    policy = make_policy(11, block_size=16, max_tokens_per_step=64)
    first = policy.add(list(range(55)))
    policy.step()
    assert first.sequences[0].blocks == [0, 1, 2, 3] and len(policy.scheduler.cache) == 3
    second = policy.add([*range(48), 99, 98])
    assert policy.step() == [1, 2]
    assert second.sequences[0].blocks == [0, 1, 2, 4]
    policy.abort(first)
    policy.abort(second)
    # Blocks without a known prefix first, then those never used, then the prefix from its tail to its root.
    assert policy.scheduler.allocator.allocate(11) == [4, 3, 5, 6, 7, 8, 9, 10, 2, 1, 0]


def test_prefix_tokens_are_compared(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.prefix_cache.chain_hash", lambda parent, tokens: b"the same for all")
    policy = make_policy()
    for token in (1, 2):
        policy.add([token] * 6, max_tokens=1)
        assert policy.step() == [6]


def test_group_prompt_is_computed_once_and_late_samples_start_from_it(make_policy: MakePolicy) -> None:
    policy = make_policy(max_num_seqs=3, max_tokens_per_step=4)
    policy.add(list(range(10)), n=5, max_tokens=3)
    computed = started = 0
    while policy.scheduler.has_work:
        plan = policy.scheduler.schedule()
        computed += sum(count for s, count in plan.chunks if s.num_output == 0)
        started += len(plan.starts)
        policy.check()
        policy.advance(plan)
    assert (computed, started) == (10, 4)
    assert policy.scheduler.allocator.num_free == 64


def test_writers_of_a_shared_block_get_copies(make_policy: MakePolicy) -> None:
    policy = make_policy()
    request = policy.add([7] * 6, n=3)
    policy.step()
    plan = policy.scheduler.schedule()
    assert len(plan.copies) == 2 and len({copy for _, copy in plan.copies}) == 2
    assert len({sequence.blocks[1] for sequence in request.sequences}) == 3
    assert len({sequence.blocks[0] for sequence in request.sequences}) == 1


def test_the_newest_is_preempted_and_nobody_admitted_in_that_step(make_policy: MakePolicy) -> None:
    policy = make_policy(6, max_tokens_per_step=64, prefix_caching=False)
    old, new = (policy.add([number] * 4, max_tokens=20) for number in range(2))
    while policy.scheduler.allocator.num_free:
        policy.step()
    while all(sequence.num_tokens <= 12 for sequence in policy.scheduler.running):
        policy.step()
    urgent = policy.add([2] * 4, max_tokens=20, priority=-1)  # first in line, and the freed blocks would do for it
    plan = policy.scheduler.schedule()
    assert plan.num_preempted == 1
    assert [s.request for s, _ in plan.chunks] == [old] and policy.scheduler.running == old.sequences
    assert new.sequences[0].num_computed == 0 and new.waiting
    policy.advance(plan)
    assert urgent in [sequence.request for sequence, _ in policy.scheduler.schedule().chunks]


def test_lower_priority_number_goes_first_and_is_preempted_last(make_policy: MakePolicy) -> None:
    policy = make_policy(max_num_seqs=1)
    policy.add([1, 2])
    urgent = policy.add([3, 4], priority=-1)
    assert policy.scheduler.schedule().chunks[0][0].request is urgent


def test_reuse_order_of_free_blocks() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(3) == [0, 1, 2]
    allocator.mark_cached(0)
    allocator.mark_cached(1)
    allocator.release([2, 1, 0])
    assert allocator.allocate(4) == [2, 3, 1, 0] and allocator.num_free == 0


def test_a_reused_block_is_forgotten(make_policy: MakePolicy) -> None:
    cache = PrefixCache(2, block_size=2)
    sequence = make_policy().add([1, 2, 3]).sequences[0]
    sequence.blocks = cache.allocator.allocate(2)
    sequence.num_computed = 3
    cache.publish(sequence)
    cache.allocator.release(reversed(sequence.blocks))
    assert cache.lookup([1, 2, 9]).blocks == [0]
    assert cache.allocator.allocate(2) == [1, 0]
    assert cache.lookup([1, 2, 9]).blocks == [] and len(cache) == 0


# Sliding windows


def test_a_sequence_holds_its_window_and_no_more(make_policy: MakePolicy) -> None:
    policy = make_policy(block_size=4, max_num_seqs=2, max_tokens_per_step=8, window=10)
    sequence = policy.add([1] * 30, max_tokens=40).sequences[0]
    while policy.scheduler.has_work:
        policy.step()
        policy.check()
        if sequence.blocks:
            held = [index for index, block in enumerate(sequence.window_blocks) if block >= 0]
            seen = range(max(0, sequence.num_computed - 9), sequence.num_computed)  # by the next token, besides itself
            assert held == sorted({position // 4 for position in seen})
            assert len(sequence.blocks) == -(-sequence.num_computed // 4)


def test_a_prefix_is_found_as_long_as_its_last_window_is_there(make_policy: MakePolicy) -> None:
    policy = make_policy(block_size=4, max_num_seqs=2, max_tokens_per_step=64, window=6)
    windows = policy.scheduler.kv.window_allocator
    assert windows.num_blocks == window_pool_blocks(
        6, block_size=4, num_blocks=64, max_num_seqs=2, max_tokens_per_step=64
    )
    prompt = list(range(30))
    policy.add(prompt, max_tokens=1)
    assert policy.step() == [30]
    again = policy.add([*prompt[:20], 77, 78], max_tokens=2)
    assert policy.step() == [2], "20 tokens hit; of the window pool only what the next token sees is held"
    assert [block >= 0 for block in again.sequences[0].window_blocks] == [False] * 4 + [True] * 2
    policy.step()
    lost = policy.scheduler.cache.lookup([*prompt[:20], 77]).window_blocks[-1]
    taken = windows.allocate(windows.num_free)
    assert lost in taken and policy.scheduler.cache.lookup([*prompt[:20], 77]).blocks == []
    assert len(policy.scheduler.cache) > 0, "the other layers still have it, but one pool alone is no use"


def test_a_model_whose_window_is_wider_than_the_pool_needs_no_more_than_the_pool() -> None:
    assert window_pool_blocks(4096, block_size=16, num_blocks=100, max_num_seqs=64, max_tokens_per_step=2048) == 100


# Static batching


def test_a_static_batch_keeps_its_slots_until_all_are_done(make_policy: MakePolicy) -> None:
    policy = make_policy(max_num_seqs=3, max_tokens_per_step=64, static=True)
    lengths = [2, 5, 9, 4, 1]
    for index, length in enumerate(lengths):
        policy.add([index + 1] * 3, max_tokens=length)
    steps = slots = used = 0
    while policy.scheduler.has_work:
        waiting = bool(policy.scheduler.waiting)
        chunks = policy.step()
        policy.check()
        steps, used = steps + 1, used + len(chunks)
        slots += 3 if waiting else 2
    assert steps == 9 + 4, "the second batch begins when the longest of the first has ended"
    assert used == sum(lengths)
