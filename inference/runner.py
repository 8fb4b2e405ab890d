"""The model and its KV pool: runs a step's batch and gives the logits that are wanted.

Logits are made only for the rows somebody reads; of a prompt that is usually the last token alone.

Suffixes: T tokens, R wanted rows, V vocabulary.
"""

import numpy as np
import torch

from inference.logprobs import token_logprobs
from inference.model.decoder import Decoder
from inference.model.kv_pools import KVPools
from inference.model.step_tensors import moved, on_device
from inference.step_batch import StepBatch, dense_batch

_LOGIT_ROWS = 256  # logits made at once when all positions are wanted: bounds memory, not results


class Runner:
    def __init__(
        self, decoder: Decoder, *, num_blocks: int, block_size: int, num_window_blocks: int | None = None
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.pools = self._new_pools(num_blocks, num_window_blocks)

    def copy_blocks(self, copies: list[tuple[int, int]], window_copies: list[tuple[int, int]]) -> None:
        self.pools.copy_blocks(copies, window_copies)

    @torch.inference_mode()
    def run(self, batch: StepBatch, drawn_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of the step's tokens; their KV is in the pool. `drawn_ids`: of the last draw, on the device."""
        batch = moved(batch, self.decoder.device)
        if batch.unread_2U is not None:
            assert batch.tensors is not None and drawn_ids is not None
            places_U, drawn_U = on_device(batch.unread_2U, self.decoder.device)
            batch.tensors.token_ids_T[places_U] = drawn_ids[drawn_U]  # in the host's array too, on a CPU
        return self.decoder.forward(batch, self.pools)

    @torch.inference_mode()
    def logits(self, hidden_TM: torch.Tensor | None, rows: list[int], more: list[torch.Tensor]) -> torch.Tensor:
        """[R, V], of some rows of a step's hidden states, then of ones kept from earlier; valid until the next call."""
        kept = [torch.stack(more)] if more else []
        if hidden_TM is None or not rows:
            return self.decoder.logits(kept[0])
        if rows != list(range(len(hidden_TM))):
            hidden_TM = hidden_TM[on_device(np.array(rows, np.int64), hidden_TM.device)]
        return self.decoder.logits(torch.cat([hidden_TM, *kept]) if kept else hidden_TM)

    @torch.inference_mode()
    def given_logprobs(self, hidden_TM: torch.Tensor, token_ids_T: np.ndarray) -> np.ndarray:
        """[T] float32: raw logprob of each given token, drawn after the hidden state in the same place."""
        ids_T = torch.from_numpy(token_ids_T).to(hidden_TM.device)
        parts = [
            token_logprobs(self.decoder.logits(hidden), ids)
            for hidden, ids in zip(hidden_TM.split(_LOGIT_ROWS), ids_T.split(_LOGIT_ROWS), strict=True)
        ]
        return torch.cat(parts).cpu().numpy()

    @torch.inference_mode()
    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Teacher-forced raw logprobs, [L - 1] each. Uses a pool of its own: running requests notice nothing."""
        batch, num_blocks = dense_batch(sequences, block_size=self.block_size)
        hidden_TM = self.decoder.forward(batch, self._new_pools(num_blocks, None))
        logprobs_T = self.given_logprobs(hidden_TM, np.roll(batch.token_ids_T, -1))
        ends = batch.chunk_ends_C.tolist()
        return [logprobs_T[start : end - 1] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _new_pools(self, num_blocks: int, num_window_blocks: int | None) -> KVPools:
        decoder = self.decoder
        return KVPools(
            decoder.arch,
            num_blocks,
            num_window_blocks,
            block_size=self.block_size,
            dtype=decoder.dtype,
            device=decoder.device,
        )
