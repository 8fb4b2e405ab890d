"""One step as flat arrays: the tokens to compute, where their KV goes, which logits are wanted.

Token arrays hold the chunks of all sequences one behind the other, no padding. A slot is a place in the KV pool
(block * block_size + offset).

Suffixes: T tokens, U tokens whose ids are in flight, C chunks, R rows of the block table, W its width.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from inference.request import Sequence

if TYPE_CHECKING:
    from inference.model.step_tensors import StepTensors


@dataclass(frozen=True, slots=True)
class StepBatch:
    token_ids_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64
    rows_T: np.ndarray  # int64, row of `block_table_RW` each token belongs to
    slots_T: np.ndarray  # int64, where its key and value are written
    chunk_ends_C: np.ndarray  # int64, cumulative; the last token of chunk c is chunk_ends_C[c] - 1
    block_table_RW: np.ndarray  # int32
    windowed: "StepBatch | None" = None
    """the same step as the pool of the sliding layers has it, where they have one of their own"""
    unread_2U: np.ndarray | None = None
    """int64, where tokens are in flight: places of `token_ids_T` that hold no id yet, and which of the ids drawn last
    belongs in each"""
    tensors: "StepTensors | None" = None
    """the arrays on the device, once they are there"""

    @property
    def only_decodes(self) -> bool:
        """One token of each sequence."""
        return len(self.chunk_ends_C) == len(self.token_ids_T)

    def trimmed(self, block_size: int) -> "StepBatch":
        """Without the columns of the block tables that no position of this step reaches."""
        step = self if self.windowed is None else replace(self, windowed=self.windowed.trimmed(block_size))
        width = int(self.positions_T.max()) // block_size + 1
        return replace(step, block_table_RW=self.block_table_RW[:, :width])


class BlockTable:
    """The block tables of all running sequences as one matrix a pool, rewritten only where they changed."""

    def __init__(self, max_num_seqs: int, *, block_size: int, windowed: bool = False) -> None:
        self.block_size = block_size
        self.table_RW = np.zeros((max_num_seqs, 16), np.int32)
        self.window_table_RW = np.zeros((max_num_seqs, 16), np.int32) if windowed else None

    def update(self, *, entered: list[Sequence], grown: list[Sequence]) -> None:
        for sequences, whole in ((entered, True), (grown, False)):
            for sequence in sequences:
                if sequence.row >= 0:  # else it was preempted after it grew
                    first = 0 if whole else sequence.num_computed // self.block_size
                    self.table_RW = _write(self.table_RW, sequence.row, first, sequence.blocks)
                    if self.window_table_RW is not None:
                        blocks = sequence.window_blocks
                        first = max(first, sequence.num_slid)
                        self.window_table_RW = _write(self.window_table_RW, sequence.row, first, blocks)

    def batch(self, chunks: list[tuple[Sequence, int]]) -> StepBatch:
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        ends: list[int] = []
        unread: list[int] = []
        drawn: list[int] = []
        for sequence, count in chunks:
            start = sequence.num_computed
            if count == 1:
                if start < len(sequence.token_ids):
                    tokens.append(sequence.token_ids[start])
                else:
                    unread.append(len(tokens))
                    drawn.append(sequence.drawn_row)
                    tokens.append(0)
                positions.append(start)
                rows.append(sequence.row)
            else:
                tokens += sequence.token_ids[start : start + count]
                tokens += sequence.draft
                positions += range(start, start + count)
                rows += [sequence.row] * count
            ends.append(len(tokens))
        batch = make_batch(tokens, positions, rows, ends, self.table_RW, block_size=self.block_size)
        if unread:
            batch = replace(batch, unread_2U=np.array([unread, drawn], np.int64))
        if self.window_table_RW is None:
            return batch
        table_RW = self.window_table_RW
        slots_T = _slots(table_RW, batch.rows_T, batch.positions_T, self.block_size)
        return replace(batch, windowed=replace(batch, slots_T=slots_T, block_table_RW=table_RW))


def _write(table_RW: np.ndarray, row: int, first: int, blocks: list[int]) -> np.ndarray:
    """The entries of one row from `first` on; a wider table where it has become too narrow."""
    width = table_RW.shape[1]
    if len(blocks) > width:
        table_RW = np.pad(table_RW, ((0, 0), (0, max(len(blocks), 2 * width) - width)))
    table_RW[row, first : len(blocks)] = blocks[first:]
    return table_RW


def _slots(table_RW: np.ndarray, rows_T: np.ndarray, positions_T: np.ndarray, block_size: int) -> np.ndarray:
    blocks_T = table_RW[rows_T, positions_T // block_size].astype(np.int64)
    return blocks_T * block_size + positions_T % block_size


def make_batch(
    tokens: list[int],
    positions: list[int],
    rows: list[int],
    ends: list[int],
    table_RW: np.ndarray,
    *,
    block_size: int,
) -> StepBatch:
    positions_T = np.array(positions, np.int64)
    rows_T = np.array(rows, np.int64)
    slots_T = _slots(table_RW, rows_T, positions_T, block_size)
    return StepBatch(np.array(tokens, np.int64), positions_T, rows_T, slots_T, np.array(ends, np.int64), table_RW)


def dense_batch(sequences: list[np.ndarray], *, block_size: int) -> tuple[StepBatch, int]:
    """Whole sequences in blocks of their own, numbered from 0, and how many blocks that takes."""
    lengths = [len(sequence) for sequence in sequences]
    counts = [-(-length // block_size) for length in lengths]
    table_RW = np.zeros((len(sequences), max(counts)), np.int32)
    first = 0
    for row, count in enumerate(counts):
        table_RW[row, :count] = np.arange(first, first + count)
        first += count
    tokens = np.concatenate(sequences).tolist()
    positions = [position for length in lengths for position in range(length)]
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    ends = np.cumsum(lengths).tolist()
    return make_batch(tokens, positions, rows, ends, table_RW, block_size=block_size), first
