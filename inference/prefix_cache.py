"""Finding KV blocks that already hold the beginning of a prompt.

A full block is known by a chained hash of its tokens and everything before it. The chain begins with the policy
version, so a request can never match KV that older weights computed, and nothing needs flushing at an update.
Tokens are compared on a hit; a hash alone is never trusted. No torch here.
"""

import hashlib
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

from inference.block_allocator import BlockAllocator
from inference.request import Sequence


@dataclass(frozen=True, slots=True)
class CachedBlock:
    hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class PrefixCache:
    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        self.block_size = block_size
        self.version = 0
        self.allocator = BlockAllocator(num_blocks, on_reuse=self._forget)
        self._block_of: dict[bytes, int] = {}
        self._cached: dict[int, CachedBlock] = {}
        self.queries = 0
        self.hits = 0

    def lookup(self, token_ids: Items[int]) -> tuple[list[int], list[bytes]]:
        """The longest run of cached blocks that begins `token_ids`, and their hashes. Not yet held by the caller.

        At most `len(token_ids) - 1` tokens hit: the last one is always computed, for its logits.
        """
        blocks: list[int] = []
        hashes: list[bytes] = []
        parent = self._root()
        size = self.block_size
        for start in range(0, len(token_ids) - size, size):
            tokens = tuple(token_ids[start : start + size])
            key = chain_hash(parent, tokens)
            block = self._block_of.get(key)
            if block is None:
                break
            cached = self._cached[block]
            if cached.token_ids != tokens or cached.parent != parent:
                break
            blocks.append(block)
            hashes.append(key)
            parent = key
        self.queries += len(token_ids)
        self.hits += len(blocks) * size
        return blocks, hashes

    def publish(self, sequence: Sequence) -> None:
        """Make the full, computed blocks of `sequence` findable. The caller vouches for their version."""
        size = self.block_size
        hashes = sequence.block_hashes
        while (len(hashes) + 1) * size <= sequence.num_computed:
            index = len(hashes)
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            parent = hashes[-1] if hashes else self._root()
            key = chain_hash(parent, tokens)
            hashes.append(key)
            block = sequence.blocks[index]
            if key not in self._block_of and block not in self._cached:
                self._block_of[key] = block
                self._cached[block] = CachedBlock(key, parent, tokens)
                self.allocator.mark_cached(block)

    def __len__(self) -> int:
        return len(self._cached)

    def _root(self) -> bytes:
        return b"policy version %d" % self.version

    def _forget(self, block: int) -> None:
        del self._block_of[self._cached.pop(block).hash]


def chain_hash(parent: bytes, token_ids: Items[int]) -> bytes:
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=16, key=parent[:64]).digest()
