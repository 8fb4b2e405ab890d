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
    left = sorted(len(s.blocks) * scheduler.block_size - s.num_computed for s in running)
    copies = _copies(scheduler)
    steps = min(steps, _steps_with_blocks(scheduler, left, copies))
    if steps > 0 and scheduler.waiting and scheduler.free_rows:
        if _admits_next(scheduler, taken=copies + left.count(0)):
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


def _steps_with_blocks(scheduler: "Scheduler", left: list[int], copies: int) -> int:
    """The most steps for which free blocks suffice, if running sequences have so many tokens `left` in their blocks,
    ascending. Each takes a block when that is full, and then one every `block_size` steps."""
    free = scheduler.allocator.num_free
    if scheduler.kv.window_allocator is not None and any(r.shared_prompt is not None for r in scheduler.waiting):
        free = min(free, scheduler.kv.window_allocator.num_free)
    if copies > free:
        return 0
    rounds, more = divmod(free - copies, len(left))
    return rounds * scheduler.block_size + min(left[more], scheduler.block_size - 1)


def _copies(scheduler: "Scheduler") -> int:
    """Blocks that the next step copies before it writes: of those who share one, the last one left alone keeps it."""
    size = scheduler.block_size
    sharing = (s for s in scheduler.running if s.num_computed < s.num_shared * size)
    writers = Counter(s.blocks[s.num_computed // size] for s in sharing)
    return sum(min(count, scheduler.allocator.ref_counts[block] - 1) for block, count in writers.items())


def _admits_next(scheduler: "Scheduler", *, taken: int) -> bool:
    """Whether the next step would admit, once the running sequences have taken the blocks they need in it."""
    request = scheduler.waiting[0]
    sequence = request.waiting[0]
    if request.shared_prompt is not None and sequence.num_output == 0:
        return scheduler.has_room(taken + 1)
    if scheduler.max_tokens_per_step == len(scheduler.running):
        return False
    return scheduler.has_room(taken + 1) and scheduler.has_room_for(
        sequence, scheduler.find_prefix(sequence), taken=taken
    )
