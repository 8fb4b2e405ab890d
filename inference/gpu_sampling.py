"""Sampling on the device the logits are on: the rules of a step go there in one copy, the tokens stay.

Twin: `inference.sampler.sample_torch`.

Suffixes: R rows, V vocabulary, C rows of counts, E masked ids of a row.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from inference.device_copy import to_device
from inference.logprobs import likeliest
from inference.model.decoder import Decoder
from inference.penalty_counts import IN_PROMPT, PenaltyCounts
from inference.sampler import Sampled, SamplingBatch

if TYPE_CHECKING:
    from inference.kernels.gpu_sampler import Draw

_NO_PENALTY = (1.0, 0.0, 0.0)


def new_gpu_sampler(decoder: Decoder) -> "GpuSampler | None":
    """None where Triton does not compute."""
    return None if decoder.gpu is None else GpuSampler(decoder.arch.vocab_size, decoder.device)


class GpuSampler:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts = PenaltyCounts(vocab_size, device)

    @torch.inference_mode()
    def sample(self, logits_RV: torch.Tensor, batch: SamplingBatch) -> Sampled:
        """`logits_RV` is float32 and left as it is. Waits for nothing."""
        draw, final = self._draw(logits_RV, batch)
        scores_R4 = draw.scores_R4
        return Sampled(
            draw.token_ids_R,
            scores_R4[:, 0],
            scores_R4[:, 1],
            ~scores_R4[:, 2:].isfinite().all(1),
            {
                row: likeliest(logits_RV[row], scores_R4[row, 3], k)
                if raw
                else likeliest(final[row], scores_R4[row, 2], k)
                for row, k, raw in batch.num_top_R
            },
        )

    def _draw(self, logits_RV: torch.Tensor, batch: SamplingBatch) -> "tuple[Draw, dict[int, torch.Tensor]]":
        """What was drawn, and the final logits of rows that want their likeliest tokens."""
        from inference.kernels.gpu_launch import run
        from inference.kernels.gpu_sampler import Draw, draw_launches, process_launch
        from inference.kernels.gpu_truncation import truncation_launch

        rows, vocab_size = logits_RV.shape
        truncated = bool(batch.truncated_R.any())
        penalties_R3 = np.full((rows, 3), _NO_PENALTY, np.float32)
        for row, sequence, _ in batch.penalized:
            params = sequence.request.params
            penalties_R3[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        limited_R = batch.truncated_R
        arrays = to_device(
            [
                batch.scales_R,
                (batch.temperatures_R == 0).astype(np.int32),
                batch.words_R2.astype(np.uint32),
                np.where(limited_R, np.minimum(batch.top_k_R, vocab_size), 0),
                np.where(limited_R, batch.top_p_R, 1).astype(np.float32),
                np.where(limited_R, batch.min_p_R, 0).astype(np.float32),
                penalties_R3,
                self._counts.rows(batch.penalized, rows, batch.drawn_ids),
                _padded_ids(batch.masked, rows),
            ],
            self._device,
        )
        scales_R, greedy_R, words_R2, top_k_R, top_p_R, min_p_R, penalties, count_rows_R, masked_RE = arrays
        launches = []
        x_RV: torch.Tensor | None = None
        limits: tuple[torch.Tensor, torch.Tensor] | None = None
        counts: tuple[torch.Tensor, torch.Tensor] | None = None
        if truncated or batch.penalized or batch.masked or batch.num_top_R:
            # Rows of whole vectors; what lies behind the vocabulary is -inf.
            x_RV = torch.empty((rows, -(-vocab_size // 16) * 16), device=self._device)
            launches.append(
                process_launch(
                    logits_RV, scales_R, penalties, count_rows_R, self._counts.counts_CV, masked_RE, x_RV, IN_PROMPT
                )
            )
        if truncated and x_RV is not None:
            limits = torch.empty(rows, device=self._device), torch.empty_like(greedy_R)
            launches.append(truncation_launch(x_RV, top_k_R, top_p_R, min_p_R, *limits))
        if batch.penalized:
            counts = count_rows_R, self._counts.counts_CV
        draw = Draw(
            torch.empty(rows, dtype=torch.int64, device=self._device), torch.empty((rows, 4), device=self._device)
        )
        run([*launches, *draw_launches(logits_RV, x_RV, scales_R, greedy_R, words_R2, limits, counts, draw)])
        final = (
            {row: _limited(x_RV[row, :vocab_size], row, limits) for row, *_ in batch.num_top_R}
            if x_RV is not None
            else {}
        )
        return draw, final


def _padded_ids(masked: list[tuple[int, list[int]]], rows: int) -> np.ndarray:
    """[R, E], -1 where there is none"""
    ids_RE = np.full((rows, max((len(ids) for _, ids in masked), default=0)), -1, np.int32)
    for row, ids in masked:
        ids_RE[row, : len(ids)] = ids
    return ids_RE


def _limited(x_V: torch.Tensor, row: int, limits: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    if limits is None:
        return x_V
    threshold, last_id = limits[0][row], limits[1][row]
    ids_V = torch.arange(len(x_V), device=x_V.device)
    return x_V.masked_fill(~((x_V > threshold) | ((x_V == threshold) & (ids_V <= last_id))), -torch.inf)
