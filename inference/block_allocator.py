"""KV blocks with reference counts: who holds which, and which is reused next.

A block whose last holder left goes to the free queue but keeps its content until it is handed out again, so the
prefix cache can take it back (`acquire`). Order of reuse: blocks nobody can look up first, then the longest unused.
No torch here: a block is a number.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockAllocator:
    def __init__(self, num_blocks: int, *, on_reuse: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._on_reuse = on_reuse
        self._cached: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """That many blocks, each with one holder. The caller has looked at `num_free`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block in self._cached:
                self._cached.discard(block)
                if self._on_reuse is not None:
                    self._on_reuse(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def replace(self, block: int, copies: list[tuple[int, int]]) -> int:
        """A block of one's own instead of a shared one; the copy to be made is added to `copies`."""
        (own,) = self.allocate(1)
        copies.append((block, own))
        self.release((block,))
        return own

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more holder for each block, also for free ones whose content is still wanted."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less. Give a sequence's blocks last first: the tail of a prefix is reused before its root."""
        for block in blocks:
            count = self.ref_counts[block] - 1
            assert count >= 0, f"block {block} is released more often than it was held"
            self.ref_counts[block] = count
            if count == 0:
                self._free[block] = None
                if block not in self._cached:
                    self._free.move_to_end(block, last=False)

    def mark_cached(self, block: int) -> None:
        """The prefix cache knows this block: keep it as long as possible, and say so when it is reused."""
        assert self.ref_counts[block] > 0, f"block {block} is cached while nobody holds it"
        self._cached.add(block)
