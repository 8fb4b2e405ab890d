"""How long a scheduler will only decode: simulators then leap over that many steps at once.

Decoding on is all that happens while no sequence ends, none is admitted, and no block has to be taken from anybody.
What a sequence draws does not matter here, only when it ends. No torch here.
"""

from collections import Counter
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING

from inference.request import Sequence

if TYPE_CHECKING:
    from inference.scheduler import Scheduler


def last_length(sequence: Sequence) -> int:
    return sequence.max_tokens


def steps_until_change(scheduler: "Scheduler", *, ends_at: Callable[[Sequence], int] = last_length) -> int:
    """The number of next steps in which each running sequence, and nobody else, computes one token.

    Each draws one token a step and ends with `ends_at` tokens; the last of the steps is the one that ends a sequence.
    Never too many. Too few only in four corners. A prompt's very last token, computed by itself while group mates wait
    for it, counts as a change, and so does dropping prompts kept for later. Where somebody waits for blocks with a
    row free, and prefix caching is on, what the cache will hold by then may let him in: the steps up to the next full
    block are promised and no more. And where blocks are short, those that a refused draft left do not count.
    """
    running = scheduler.running
    if not running or len(running) > scheduler.max_tokens_per_step:
        return 0
    steps = ends_at(running[0])
    for sequence in running:
        length, request = sequence.num_tokens, sequence.request
        if length - sequence.num_computed != 1 or (request.leader is sequence and request.waiting):
            return 0
        steps = min(steps, ends_at(sequence) - length)
    steps = _steps_with_blocks(scheduler, steps)
    if steps > 0 and scheduler.waiting and scheduler.free_rows:
        if _admits_next(scheduler):
            return 0
        if scheduler.prefix_caching:
            size = scheduler.block_size
            publishing = [size - s.num_computed % size for s in running if s.publishable]
            steps = min([steps, *publishing])
    return max(steps, 0)


def leap(scheduler: "Scheduler", steps: int, *, token: int = 0) -> None:
    """The state after that many steps of mere decoding, each of which drew `token`. Block numbers may differ.

    `steps` are no more than `steps_until_change` says, which is not asked again: simulators leap all the time."""
    while steps:
        size, stride = scheduler.block_size, steps
        if scheduler.prefix_caching:  # what is taken from the cache and what comes into it keep their order
            stride = min([stride, *(size - s.num_computed % size for s in scheduler.running if s.publishable)])
        for sequence in scheduler.running:
            scheduler.kv.advance(sequence, sequence.num_computed + stride)
        for sequence in scheduler.running:
            sequence.token_ids.extend(repeat(token, stride))
            scheduler.computed(sequence, stride)
        steps -= stride


def _steps_with_blocks(scheduler: "Scheduler", steps: int) -> int:
    """The most steps, up to `steps`, for which free blocks suffice."""
    free = scheduler.allocator.num_free
    if scheduler.kv.window_allocator is not None and any(r.shared_prompt is not None for r in scheduler.waiting):
        free = min(free, scheduler.kv.window_allocator.num_free)
    if steps <= 0 or blocks_needed(scheduler, steps) <= free:
        return max(steps, 0)
    free -= blocks_needed(scheduler, 0)
    if free < 0:
        return 0
    # Each takes a block every `size` steps, the first when what is left of its last one is full.
    size = scheduler.block_size
    left = sorted(min(len(s.blocks) * size - s.num_computed, size - 1) for s in scheduler.running)
    rounds, more = divmod(free, len(left))
    return rounds * size + left[more]


def blocks_needed(scheduler: "Scheduler", steps: int) -> int:
    """Blocks that the running sequences take from the pool in that many steps of decoding; in none, those which they
    must copy before they write."""
    size, needed = scheduler.block_size, 0
    writers: Counter[int] = Counter()
    for sequence in scheduler.running:
        computed, held = sequence.num_computed, len(sequence.blocks)
        if (missing := computed + steps - held * size) > 0:
            needed -= -missing // size
        if computed < sequence.num_shared * size:
            writers[sequence.blocks[computed // size]] += 1
    # Of those who share a block and write into it, the last one left alone keeps it.
    return needed + sum(min(count, scheduler.allocator.ref_counts[block] - 1) for block, count in writers.items())


def _admits_next(scheduler: "Scheduler") -> bool:
    """Whether the next step would admit, once the running sequences have taken the blocks they need in it."""
    request = scheduler.waiting[0]
    sequence = request.waiting[0]
    taken = blocks_needed(scheduler, 1)
    if request.shared_prompt is not None and sequence.num_output == 0:
        return scheduler.has_room(taken + 1)
    if scheduler.max_tokens_per_step == len(scheduler.running):
        return False
    return scheduler.has_room(taken + 1) and scheduler.has_room_for(
        sequence, scheduler.find_prefix(sequence), taken=taken
    )
