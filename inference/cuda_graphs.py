"""Replaying a decode step instead of launching it kernel by kernel, for a small model's step is mostly launching.

A graph reads and writes fixed addresses, so a batch is copied into static buffers first. There is one graph for each of
some batch sizes, made once; weights and KV pools are only ever changed in place, so a graph stays valid. A batch
between two sizes is padded with rows that read and write a block of the pool that nobody holds, the null block.

Without a capture (on a CPU) a replay is the same call on the same static buffers.

Suffixes: T tokens, which are sequences here, R rows of the block table, W its width.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from inference.model.step_tensors import StepTensors
from inference.step_batch import StepBatch

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Replay], Replay]


def batch_sizes(largest: int) -> list[int]:
    """Ascending, and close enough together that padding costs little: 1, 2, 4, then steps of 8, above 256 of 16."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest, 16)]
    return [*(size for size in sizes if size < largest), largest]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What a step reads of one pool, for as many sequences as may run at once."""

    tensors: StepTensors
    null_block: int
    block_size: int

    def view(self, size: int) -> StepTensors:
        t = self.tensors
        return StepTensors(
            t.token_ids_T[:size], t.positions_T[:size], t.rows_T[:size], t.slots_T[:size], t.block_table_RW[:size]
        )

    def fill(self, step: StepTensors, size: int) -> None:
        """The step, then rows up to `size` that touch the null block alone, whatever was there before."""
        t, count = self.tensors, len(step.token_ids_T)
        width = min(step.block_table_RW.shape[1], t.block_table_RW.shape[1])
        t.token_ids_T[:count] = step.token_ids_T
        t.positions_T[:count] = step.positions_T
        t.slots_T[:count] = step.slots_T
        t.block_table_RW[:count, :width] = step.block_table_RW[step.rows_T, :width]
        t.token_ids_T[count:size] = 0
        t.positions_T[count:size] = 0
        t.slots_T[count:size] = self.null_block * self.block_size
        t.block_table_RW[count:size, 0] = self.null_block


class DecodeGraphs:
    def __init__(
        self,
        forward: Callable[[StepBatch], torch.Tensor],
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        null_block: int,
        null_window_block: int | None,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        """`forward` gives the hidden states of a batch; with a capture it may look at `batch.tensors` alone.

        `max_blocks`: of one sequence. The null blocks lie in the pools and are never handed out.
        """
        self.sizes = batch_sizes(max_num_seqs)

        def buffers(null: int) -> _Buffers:
            ids_T, positions_T, slots_T = (torch.zeros(max_num_seqs, dtype=torch.int64, device=device) for _ in "tps")
            rows_T = torch.arange(max_num_seqs, device=device)
            table_RW = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
            return _Buffers(StepTensors(ids_T, positions_T, rows_T, slots_T, table_RW), null, block_size)

        self._full = buffers(null_block)
        self._windowed = None if null_window_block is None else buffers(null_window_block)
        self._replays: dict[int, Replay] = {}
        nothing = self._full.view(0)
        for size in reversed(self.sizes):  # the largest first: the others fit into the memory it leaves
            self._fill(nothing, nothing, size)
            batch = self._static_batch(size)

            def run(batch: StepBatch = batch) -> torch.Tensor:
                return forward(batch)

            self._replays[size] = run if capture is None else capture(run)

    def fits(self, batch: StepBatch) -> bool:
        return batch.only_decodes and len(batch.token_ids_T) <= self.sizes[-1]

    def run(self, batch: StepBatch) -> torch.Tensor:
        """[T, M], valid until the next call. The batch's tensors must be on the device."""
        count = len(batch.token_ids_T)
        size = self.sizes[bisect_left(self.sizes, count)]
        assert batch.tensors is not None, "move the batch first"
        self._fill(batch.tensors, None if batch.windowed is None else batch.windowed.tensors, size)
        return self._replays[size]()[:count]

    def _fill(self, step: StepTensors, windowed: StepTensors | None, size: int) -> None:
        self._full.fill(step, size)
        if self._windowed is not None:
            assert windowed is not None, "the window pool has a table of its own"
            self._windowed.fill(windowed, size)

    def _static_batch(self, size: int) -> StepBatch:
        batch = _batch(self._full.view(size))
        return batch if self._windowed is None else replace(batch, windowed=_batch(self._windowed.view(size)))


def _batch(step: StepTensors) -> StepBatch:
    """On a CPU its arrays are the tensors' memory; elsewhere they have the shapes, and nobody may look at the rest."""

    def array(tensor: torch.Tensor) -> np.ndarray:
        return tensor.numpy() if tensor.device.type == "cpu" else np.full(tuple(tensor.shape), -1)

    return StepBatch(
        array(step.token_ids_T),
        array(step.positions_T),
        array(step.rows_T),
        array(step.slots_T),
        np.arange(1, len(step.token_ids_T) + 1),
        array(step.block_table_RW),
        tensors=step,
    )


class CudaCapture:
    """Records what a call launches; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles kernels and sets libraries up, which no graph may hold
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others' threads go on
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
