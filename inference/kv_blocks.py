"""The block tables of sequences: which blocks of the KV pools each one holds, shares, copies and gives back.

A model may have layers that see everything and layers that see a sliding window. The first keep all blocks of a
sequence. The second have a pool and a table of their own (`window_blocks`, same indices), from which a block leaves as
soon as no later token can see it. The window pool is sized so that it never runs out before the other does, save for
prompts kept for later, which may be dropped: admission and preemption need to look at the full pool alone.
No torch here: a block is a number.
"""

from inference.prefix_cache import Hit, PrefixCache
from inference.request import Sequence, SharedPrompt

Copies = list[tuple[int, int]]
GONE = -1
"""in place of a window block that was given back"""


class KVBlocks:
    def __init__(
        self, num_blocks: int, *, block_size: int, window: int | None = None, num_window_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.cache = PrefixCache(num_blocks, block_size=block_size, window=window, num_window_blocks=num_window_blocks)
        self.allocator = self.cache.allocator
        self.window_allocator = self.cache.window_allocator

    def count(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def adopt(self, sequence: Sequence, hit: Hit) -> None:
        """`sequence` holds nothing yet and begins with what the prefix cache found."""
        self._acquire(hit.blocks, hit.window_blocks)
        sequence.blocks, sequence.window_blocks = list(hit.blocks), list(hit.window_blocks)
        sequence.block_hashes = list(hit.hashes)
        sequence.num_shared = len(hit.blocks)
        sequence.num_computed = len(hit.blocks) * self.block_size
        sequence.num_slid = self._num_dead(sequence.num_computed)

    def fits(self, sequence: Sequence, num_tokens: int) -> bool:
        """True when the next write, up to `num_tokens`, needs no new block."""
        size = self.block_size
        return num_tokens <= len(sequence.blocks) * size and sequence.num_computed >= sequence.num_shared * size

    def grow(self, sequence: Sequence, num_tokens: int, copies: Copies, window_copies: Copies) -> bool:
        """Blocks of its own for `sequence` to write up to `num_tokens`. False, and nothing done, if there are too few.

        A block that others hold too is copied before the first write into it.
        """
        first = sequence.num_computed // self.block_size
        missing = max(0, self.count(num_tokens) - len(sequence.blocks))
        shared = first < sequence.num_shared
        full, window = self.allocator, self.window_allocator
        copy = shared and full.ref_counts[sequence.blocks[first]] > 1
        if missing + copy > full.num_free:
            return False
        if window is not None:
            copy_window = shared and window.ref_counts[sequence.window_blocks[first]] > 1
            if missing + copy_window > window.num_free:
                return False
            if copy_window:
                sequence.window_blocks[first] = window.replace(sequence.window_blocks[first], window_copies)
            sequence.window_blocks += window.allocate(missing)
        if copy:
            sequence.blocks[first] = full.replace(sequence.blocks[first], copies)
        sequence.blocks += full.allocate(missing)
        if shared:
            sequence.num_shared = first
        return True

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks as if `sequence` had computed up to `num_tokens` one by one, `grow` and `slide` each time. The caller
        has counted that there are enough. For simulators: what slid out of sight in between is never allocated."""
        if self.window_allocator is None and self.fits(sequence, num_tokens):
            return
        block_end = (sequence.num_computed // self.block_size + 1) * self.block_size
        if self.window_allocator is None or sequence.num_computed < sequence.num_shared * self.block_size:
            grown = self.grow(sequence, num_tokens if self.window_allocator is None else block_end, [], [])
            assert grown, "blocks were counted"
        if self.window_allocator is None:
            return
        sequence.blocks += self.allocator.allocate(max(0, self.count(num_tokens) - len(sequence.blocks)))
        dead, had = self._num_dead(num_tokens), len(sequence.window_blocks)
        self.window_allocator.release(sequence.window_blocks[i] for i in range(sequence.num_slid, min(dead, had)))
        sequence.window_blocks[sequence.num_slid : dead] = [GONE] * max(0, dead - sequence.num_slid)
        missing = self.count(num_tokens) - len(sequence.window_blocks)
        sequence.window_blocks += self.window_allocator.allocate(max(0, missing))
        sequence.num_slid = max(dead, sequence.num_slid)

    def slide(self, sequence: Sequence) -> None:
        """Give back the window blocks that no later token of `sequence` can see."""
        if self.window_allocator is None:
            return
        dead = self._num_dead(sequence.num_computed)
        for index in range(sequence.num_slid, dead):
            self.window_allocator.release((sequence.window_blocks[index],))
            sequence.window_blocks[index] = GONE
        sequence.num_slid = max(dead, sequence.num_slid)

    def keep_prompt(self, leader: Sequence) -> SharedPrompt:
        """Hold the prompt of `leader`, about to be computed in full, for the other samples to begin from."""
        count = self.count(leader.num_prompt)
        dead = self._num_dead(leader.num_prompt)
        blocks = leader.blocks[:count]
        window_blocks = [GONE] * min(dead, count) + leader.window_blocks[dead:count] if self.window else []
        self._acquire(blocks, window_blocks)
        leader.num_shared = count
        return SharedPrompt(leader, blocks, window_blocks, list(leader.kv_events), leader.publishable)

    def drop_prompt(self, prompt: SharedPrompt) -> None:
        self._release(prompt.blocks, prompt.window_blocks)

    def start(self, sequence: Sequence, prompt: SharedPrompt) -> None:
        """`sequence` begins behind a prompt that another sample computed."""
        self._acquire(prompt.blocks, prompt.window_blocks)
        sequence.blocks, sequence.window_blocks = list(prompt.blocks), list(prompt.window_blocks)
        sequence.num_shared = len(prompt.blocks)
        sequence.num_computed = sequence.num_prompt
        sequence.num_slid = self._num_dead(sequence.num_prompt)

    def release(self, sequence: Sequence) -> None:
        self._release(sequence.blocks, sequence.window_blocks)
        sequence.blocks, sequence.window_blocks, sequence.block_hashes = [], [], []
        sequence.num_shared = sequence.num_computed = sequence.num_slid = 0

    def _num_dead(self, num_computed: int) -> int:
        """Leading blocks that lie before the window of the next token."""
        return 0 if self.window is None else max(0, (num_computed - self.window + 1) // self.block_size)

    def _acquire(self, blocks: list[int], window_blocks: list[int]) -> None:
        self.allocator.acquire(blocks)
        if self.window_allocator is not None:
            self.window_allocator.acquire(block for block in window_blocks if block != GONE)

    def _release(self, blocks: list[int], window_blocks: list[int]) -> None:
        # Last first: the tail of a prefix is reused before its root.
        self.allocator.release(reversed(blocks))
        if self.window_allocator is not None:
            self.window_allocator.release(block for block in reversed(window_blocks) if block != GONE)


def window_pool_blocks(
    window: int,
    *,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    max_tokens_per_step: int,
    max_draft: int = 0,
) -> int:
    """Enough for the window and the chunk of every running sequence, and never more than the full pool has.

    Blocks taken for a draft stay with the sequence when it is refused.
    """
    per_sequence = -(-(window - 1) // block_size) + 2 + -(-max_draft // block_size)
    return min(num_blocks, max_num_seqs * per_sequence + -(-max_tokens_per_step // block_size))
