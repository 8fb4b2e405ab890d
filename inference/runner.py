"""The model and its KV pool: runs a step's batch and gives the logits that are wanted.

Logits are made only for the rows somebody reads; of a prompt that is usually the last token alone. Where the model is
divided among ranks, whatever the leader's runner computes it first tells its followers, whose runners do the same.

Suffixes: T tokens, R wanted rows, M hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from inference.cuda_graphs import CudaCapture, DecodeGraphs
from inference.logprobs import token_logprobs
from inference.model.decoder import Decoder
from inference.model.kv_pools import KVPools
from inference.model.step_tensors import moved, on_device
from inference.step_batch import StepBatch, dense_batch

_LOGIT_ROWS = 256  # logits made at once when all positions are wanted: bounds memory, not results


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    num_blocks: int
    block_size: int
    num_window_blocks: int | None = None
    graphs: bool = False
    """replay decode steps from static buffers, where the decoder allows it"""
    max_num_seqs: int = 0
    max_model_len: int = 0


Tell = Callable[..., None]


class Runner:
    def __init__(self, decoder: Decoder, config: RunnerConfig, *, tell: Tell | None = None) -> None:
        """`tell(method, *args)`, on a leader, makes the runners of all followers call this method of theirs."""
        self.decoder = decoder
        self.config = config
        self._tell = tell
        self.logit_rows = 0
        """made so far"""
        graphs = config.graphs and decoder.capturable
        null = int(graphs)  # one block more than is ever handed out
        windows = None if config.num_window_blocks is None else config.num_window_blocks + null
        self.pools = self._new_pools(config.num_blocks + null, windows)
        self._graphs = self._capture() if graphs else None

    def copy_blocks(self, copies: list[tuple[int, int]], window_copies: list[tuple[int, int]]) -> None:
        if copies or window_copies:
            if self._tell is not None:
                self._tell("copy_blocks", copies, window_copies)
            self.pools.copy_blocks(copies, window_copies)

    @torch.inference_mode()
    def run(self, batch: StepBatch, drawn_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of the step's tokens, valid until the next call; their KV is in the pool.

        `drawn_ids`: of the last draw, on the device.
        """
        if self._tell is not None:
            self._tell("run", batch.trimmed(self.config.block_size))
        batch = moved(batch, self.decoder.device)
        if batch.unread_2U is not None and drawn_ids is not None:  # a follower gets them from the leader
            assert batch.tensors is not None
            places_U, drawn_U = on_device(batch.unread_2U, self.decoder.device)
            batch.tensors.token_ids_T[places_U] = drawn_ids[drawn_U]  # in the host's array too, on a CPU
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch)
        return self.decoder.forward(batch, self.pools)

    @torch.inference_mode()
    def logits(self, hidden_TM: torch.Tensor | None, rows: list[int], more: list[torch.Tensor]) -> torch.Tensor:
        """[R, V], of some rows of a step's hidden states, then of ones kept from earlier; valid until the next call."""
        kept = [torch.stack(more)] if more else []
        if hidden_TM is None or not rows:
            return self._head(kept[0])
        if rows != list(range(len(hidden_TM))):
            hidden_TM = hidden_TM[on_device(np.array(rows, np.int64), hidden_TM.device)]
        return self._head(torch.cat([hidden_TM, *kept]) if kept else hidden_TM)

    @torch.inference_mode()
    def given_logprobs(self, hidden_TM: torch.Tensor, token_ids_T: np.ndarray) -> np.ndarray:
        """[T] float32: raw logprob of each given token, drawn after the hidden state in the same place."""
        ids_T = torch.from_numpy(token_ids_T).to(hidden_TM.device)
        parts = [
            token_logprobs(self._head(hidden), ids)
            for hidden, ids in zip(hidden_TM.split(_LOGIT_ROWS), ids_T.split(_LOGIT_ROWS), strict=True)
        ]
        return torch.cat(parts).cpu().numpy()

    @torch.inference_mode()
    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Teacher-forced raw logprobs, [L - 1] each. Uses a pool of its own: running requests notice nothing."""
        batch, num_blocks = dense_batch(sequences, block_size=self.config.block_size)
        hidden_TM = self.run_apart(batch, num_blocks)
        logprobs_T = self.given_logprobs(hidden_TM, np.roll(batch.token_ids_T, -1))
        ends = batch.chunk_ends_C.tolist()
        return [logprobs_T[start : end - 1] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    @torch.inference_mode()
    def run_apart(self, batch: StepBatch, num_blocks: int) -> torch.Tensor:
        if self._tell is not None:
            self._tell("run_apart", batch, num_blocks)
        return self.decoder.forward(batch, self._new_pools(num_blocks, None))

    @torch.inference_mode()
    def follow_head(self, num_rows: int) -> None:
        """A follower's part of the leader's logits."""
        shape = (num_rows, self.decoder.arch.hidden_size)
        self.decoder.logits(torch.empty(shape, dtype=self.decoder.dtype, device=self.decoder.device))

    def _head(self, hidden_RM: torch.Tensor) -> torch.Tensor:
        self.logit_rows += len(hidden_RM)
        if self._tell is not None:
            self._tell("follow_head", len(hidden_RM))
        return self.decoder.logits(hidden_RM)

    @torch.inference_mode()
    def _capture(self) -> DecodeGraphs:
        config, device = self.config, self.decoder.device
        return DecodeGraphs(
            lambda batch: self.decoder.forward(batch, self.pools),
            max_num_seqs=config.max_num_seqs,
            max_blocks=-(-config.max_model_len // config.block_size),
            block_size=config.block_size,
            null_block=config.num_blocks,
            null_window_block=config.num_window_blocks,
            device=device,
            capture=CudaCapture() if device.type == "cuda" else None,
        )

    def _new_pools(self, num_blocks: int, num_window_blocks: int | None) -> KVPools:
        decoder = self.decoder
        return KVPools(
            decoder.local,
            num_blocks,
            num_window_blocks,
            block_size=self.config.block_size,
            dtype=decoder.kv_dtype,
            device=decoder.device,
        )
