"""Finding KV blocks that already hold the beginning of a prompt.

A full block is known by a chained hash of its tokens and everything before it. The chain begins with the policy
version, so a request can never match KV that older weights computed, and nothing needs flushing at an update.
Tokens are compared on a hit; a hash alone is never trusted. No torch here.
"""

import hashlib
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from inference.block_allocator import BlockAllocator
from inference.request import Sequence


@dataclass(slots=True)
class CachedBlock:
    hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    block: int
    window_block: int | None
    """the same tokens in the pool of the sliding layers, while they are there"""


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache has of a prompt; nobody holds it yet."""

    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)
    """-1 where no later token looks"""
    hashes: list[bytes] = field(default_factory=list)


class PrefixCache:
    def __init__(
        self, num_blocks: int, *, block_size: int, window: int | None = None, num_window_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.version = 0
        self.allocator = BlockAllocator(num_blocks, on_reuse=self._forget)
        self.window_allocator: BlockAllocator | None = None
        if window is not None:
            self.window_allocator = BlockAllocator(num_window_blocks, on_reuse=self._forget_window)
        self._of_hash: dict[bytes, CachedBlock] = {}
        self._of_block: dict[int, CachedBlock] = {}
        self._of_window_block: dict[int, CachedBlock] = {}
        self.queries = 0
        self.hits = 0

    def lookup(self, token_ids: Items[int]) -> Hit:
        """The longest usable run of cached blocks that begins `token_ids`.

        At most `len(token_ids) - 1` tokens hit: the last one is always computed, for its logits.
        """
        found: list[CachedBlock] = []
        parent = self._root()
        size = self.block_size
        for start in range(0, len(token_ids) - size, size):
            tokens = tuple(token_ids[start : start + size])
            key = chain_hash(parent, tokens)
            cached = self._of_hash.get(key)
            if cached is None or cached.token_ids != tokens or cached.parent != parent:
                break
            found.append(cached)
            parent = key
        return self._hit(found)

    def next_key(self, token_ids: Items[int], hashes: Items[bytes]) -> bytes | None:
        """Of the block behind those that have `hashes`. None: no full one is left before the last token."""
        start, size = len(hashes) * self.block_size, self.block_size
        if start + size >= len(token_ids):
            return None
        return chain_hash(hashes[-1] if hashes else self._root(), token_ids[start : start + size])

    def count(self, token_ids: Items[int], hit: Hit) -> None:
        """A request was admitted with what `lookup` found for it."""
        self.queries += len(token_ids)
        self.hits += len(hit.blocks) * self.block_size

    def publish(self, sequence: Sequence) -> None:
        """Make the full, computed blocks of `sequence` findable. The caller vouches for their version."""
        size = self.block_size
        hashes = sequence.block_hashes
        known = min(sequence.num_computed, len(sequence.token_ids))  # the id of the last token may be in flight
        while (len(hashes) + 1) * size <= known:
            index = len(hashes)
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            parent = hashes[-1] if hashes else self._root()
            key = chain_hash(parent, tokens)
            hashes.append(key)
            window_block = sequence.window_blocks[index] if self.window is not None else None
            self._publish(CachedBlock(key, parent, tokens, sequence.blocks[index], window_block))

    def __len__(self) -> int:
        return len(self._of_block)

    def _publish(self, new: CachedBlock) -> None:
        known = self._of_hash.get(new.hash)
        if known is None and new.block not in self._of_block:
            self._of_hash[new.hash] = self._of_block[new.block] = new
            self.allocator.mark_cached(new.block)
            self._add_window(new, new.window_block)
        elif known is not None and known.window_block is None and known.token_ids == new.token_ids:
            self._add_window(known, new.window_block)

    def _add_window(self, cached: CachedBlock, window_block: int | None) -> None:
        cached.window_block = None
        if self.window_allocator is not None and window_block is not None and window_block >= 0:
            cached.window_block = window_block
            self._of_window_block[window_block] = cached
            self.window_allocator.mark_cached(window_block)

    def _hit(self, found: list[CachedBlock]) -> Hit:
        """As much of `found` as leaves no hole in the window of the first token to be computed."""
        count, first = len(found), 0
        if self.window is not None:
            count = run = 0
            for index, cached in enumerate(found):
                run = 0 if cached.window_block is None else run + 1
                begin = max(0, ((index + 1) * self.block_size - self.window + 1) // self.block_size)
                if run >= index + 1 - begin:
                    count, first = index + 1, begin
        used = found[:count]
        window_blocks: list[int] = []
        if self.window is not None:
            window_blocks = [-1] * min(first, count)
            window_blocks += [c.window_block for c in used[first:] if c.window_block is not None]
        return Hit([c.block for c in used], window_blocks, [c.hash for c in used])

    def _root(self) -> bytes:
        return b"policy version %d" % self.version

    def _forget(self, block: int) -> None:
        cached = self._of_block.pop(block)
        del self._of_hash[cached.hash]
        if cached.window_block is not None:
            del self._of_window_block[cached.window_block]

    def _forget_window(self, window_block: int) -> None:
        cached = self._of_window_block.pop(window_block, None)
        if cached is not None:
            cached.window_block = None


def chain_hash(parent: bytes, token_ids: Items[int]) -> bytes:
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=16, key=parent[:64]).digest()
