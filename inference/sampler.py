"""From logits to tokens, every request by its own rules, all rows of a step together.

The order is Hugging Face's: repetition, frequency and presence penalty, min_tokens mask, temperature, top_k, top_p,
min_p, draw. Everything is float32. A rule that no row asks for costs nothing, a rule that few rows ask for is
applied to those rows only.

Suffixes: R rows (tokens to draw), S a subset of rows, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from inference import noise
from inference.logprobs import likeliest, log_sum_exp
from inference.model.step_tensors import on_device
from inference.request import Sequence
from olmorl.contract.generation import SamplingParams

if TYPE_CHECKING:
    from inference.gpu_sampling import GpuSampler
    from inference.kernels import cpu_sampler
    from inference.kernels.cpu_team import Team

_DRAWS_PER_THREAD = 1 << 18  # logits; below them, one more thread costs more to wake than it looks through


@dataclass(slots=True)
class SamplingBatch:
    """What the rows of one step ask for."""

    temperatures_R: np.ndarray  # float32; 0 is greedy
    top_k_R: np.ndarray  # int64; 0 is off
    top_p_R: np.ndarray
    min_p_R: np.ndarray
    words_R2: np.ndarray  # int64, from noise.row_words
    penalized: list[tuple[int, Sequence, int]] = field(default_factory=list)
    """rows with a penalty, and how many tokens of the sequence's draft stand before them"""
    masked: list[tuple[int, list[int]]] = field(default_factory=list)
    """rows that must not draw some ids yet (min_tokens)"""
    num_top_R: list[tuple[int, int, bool]] = field(default_factory=list)
    """rows that want this many likeliest tokens, and whether by the untouched logits"""
    drawn_ids: torch.Tensor | None = None
    """ids of the draw before, on the device: sequences with a token in flight find theirs there"""

    @property
    def truncated_R(self) -> np.ndarray:
        return ((self.top_k_R > 0) | (self.top_p_R < 1) | (self.min_p_R > 0)) & (self.temperatures_R > 0)

    @property
    def scales_R(self) -> np.ndarray:
        """What logits are divided by; greedy rows by 1."""
        return np.where(self.temperatures_R == 0, np.float32(1), self.temperatures_R)

    def ruled_rows(self) -> np.ndarray:
        """The rows that more than temperature applies to, ascending."""
        ruled_R = self.truncated_R
        ruled_R[[row for row, *_ in self.penalized]] = True
        ruled_R[[row for row, _ in self.masked]] = True
        return np.flatnonzero(ruled_R)

    def subset(self, rows_S: np.ndarray) -> "SamplingBatch":
        place = {row: index for index, row in enumerate(rows_S.tolist())}
        return SamplingBatch(
            self.temperatures_R[rows_S],
            self.top_k_R[rows_S],
            self.top_p_R[rows_S],
            self.min_p_R[rows_S],
            self.words_R2[rows_S],
            [(place[row], sequence, ahead) for row, sequence, ahead in self.penalized],
            [(place[row], ids) for row, ids in self.masked],
            drawn_ids=self.drawn_ids,
        )


@dataclass(slots=True)
class Sampled:
    """Tensors where they were drawn: on the device, or on the host after `to_host`."""

    token_ids_R: torch.Tensor  # int64
    logprobs_R: torch.Tensor  # float32, of the distribution drawn from
    raw_logprobs_R: torch.Tensor  # float32, log-softmax of the untouched logits
    broken_R: torch.Tensor  # bool: logits that are not a distribution (NaN, +inf, nothing left to draw)
    top: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """the likeliest ids and their logprobs, for rows that want them"""

    def to_host(self) -> "Sampled":
        """Starts the copies and does not wait for them; itself on a CPU."""
        if self.token_ids_R.device.type == "cpu":
            return self
        return Sampled(
            _to_host(self.token_ids_R),
            _to_host(self.logprobs_R),
            _to_host(self.raw_logprobs_R),
            _to_host(self.broken_R),
            {row: (_to_host(ids_K), _to_host(logprobs_K)) for row, (ids_K, logprobs_K) in self.top.items()},
        )


class SamplingTable:
    """The sampling parameters of every slot of the batch, so that a step only gathers them."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperatures = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.keys = np.zeros(max_num_seqs, np.uint64)
        self.special = np.zeros(max_num_seqs, bool)
        """slots whose request has a penalty, min_tokens or top logprobs"""

    def set(self, sequence: Sequence) -> None:
        params, row = sequence.request.params, sequence.row
        self.temperatures[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = max(params.top_p, float(np.finfo(np.float32).tiny))  # at 0 not even one token would be kept
        self.min_p[row] = params.min_p
        self.keys[row] = noise.sequence_key(sequence.request.noise_key, sequence.sample_index)
        self.special[row] = has_penalty(params) or params.min_tokens > 0 or params.logprobs > 0

    def batch(
        self, sequences: list[Sequence], drawn_ids: torch.Tensor | None = None, *, behind_drafts: bool = False
    ) -> SamplingBatch:
        """A row for the next token of each sequence, and one more behind each token of its draft; or only the last."""
        drawn = [(s, n) for s in sequences for n in range(len(s.draft) if behind_drafts else 0, 1 + len(s.draft))]
        rows = np.array([s.row for s, _ in drawn], np.int64)
        positions = np.array([s.num_tokens - s.num_prompt + ahead for s, ahead in drawn], np.int64)
        batch = SamplingBatch(
            self.temperatures[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            noise.row_words(self.keys[rows], positions),
            drawn_ids=drawn_ids,
        )
        for index in np.flatnonzero(self.special[rows]).tolist():
            sequence, ahead = drawn[index]
            params = sequence.request.params
            if has_penalty(params):
                batch.penalized.append((index, sequence, ahead))
            if positions[index] < params.min_tokens and sequence.request.stop_ids:
                batch.masked.append((index, sorted(sequence.request.stop_ids)))
            if params.logprobs:
                batch.num_top_R.append((index, params.logprobs, params.logprobs_mode == "raw"))
        return batch


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def sample(
    logits_RV: torch.Tensor, batch: SamplingBatch, team: "Team | None" = None, gpu: "GpuSampler | None" = None
) -> Sampled:
    """`logits_RV` is float32 and left as it is. A team draws with compiled kernels, a GPU with Triton's."""
    if gpu is not None:
        return gpu.sample(logits_RV, batch)
    if team is None:
        return sample_torch(logits_RV, batch)
    drawn = draw_compiled(logits_RV, batch.scales_R, batch.words_R2, batch.temperatures_R == 0, team)
    rows_S = batch.ruled_rows()
    final_SV = torch.empty(0)
    if len(rows_S):
        final_SV = process(logits_RV[torch.from_numpy(rows_S)], batch.subset(rows_S), team)
        ones_S = np.ones(len(rows_S), np.float32)
        ruled = draw_compiled(final_SV, ones_S, batch.words_R2[rows_S], batch.temperatures_R[rows_S] == 0, team)
        drawn.token_ids_R[rows_S] = ruled.token_ids_R
        drawn.lse_2R[0, rows_S] = ruled.lse_2R[0]
        drawn.scores_2R[0, rows_S] = ruled.scores_2R[0]
        drawn.scores_2R[1, rows_S] = logits_RV[torch.from_numpy(rows_S), torch.from_numpy(ruled.token_ids_R)].numpy()
    final = {row: final_SV[index] for index, row in enumerate(rows_S.tolist())}
    token_ids_R, lse_2R = torch.from_numpy(drawn.token_ids_R), torch.from_numpy(drawn.lse_2R)
    logprobs_2R = torch.from_numpy(drawn.scores_2R) - lse_2R
    top = {}
    for row, k, raw in batch.num_top_R:
        if raw:
            top[row] = likeliest(logits_RV[row], lse_2R[1, row], k)
            continue
        x_V = final.get(row)
        x_V = logits_RV[row] / float(batch.scales_R[row]) if x_V is None else x_V
        top[row] = likeliest(x_V, lse_2R[0, row], k)
    return Sampled(token_ids_R, logprobs_2R[0], logprobs_2R[1], ~torch.isfinite(lse_2R).all(0), top)


def draw_compiled(
    logits_RV: torch.Tensor, scales_R: np.ndarray, words_R2: np.ndarray, greedy_R: np.ndarray, team: "Team"
) -> "cpu_sampler.Draw":
    """Draws from softmax(logits / scales), cut to the rows there are."""
    from inference.kernels import cpu_sampler  # numba, which a machine with a GPU can do without
    from inference.kernels.cpu_team import new_signals
    from inference.kernels.cpu_tile import LANES

    rows, vocab_size = logits_RV.shape
    panels, chunks = -(-rows // LANES), -(-vocab_size // cpu_sampler.CHUNK)
    padded = panels * LANES
    draw = cpu_sampler.Draw(
        np.pad(scales_R, (0, padded - rows), constant_values=1),
        np.pad(greedy_R, (0, padded - rows)),
        np.pad(words_R2.astype(np.uint32).T, ((0, 0), (0, padded - rows))),
        np.zeros(padded, np.int64),
        np.zeros((2, padded), np.float32),
        np.zeros((2, padded), np.float32),
    )
    parts = np.empty((panels, chunks, cpu_sampler.NUM_FIELDS, LANES), np.float32)
    part_ids = np.empty((panels, chunks, LANES), np.int64)
    threads = 1 + min(team.threads - 1, padded * vocab_size // _DRAWS_PER_THREAD)
    logits_VR = _panels(logits_RV, padded, LANES)
    team.run(cpu_sampler.draw, new_signals(1), logits_VR, draw, parts, part_ids, threads=threads)
    return cpu_sampler.Draw(*(array[..., :rows] for array in draw))


def _panels(logits_RV: torch.Tensor, padded: int, lanes: int) -> np.ndarray:
    """[V, R] with rows padded to whole panels: the memory itself where it is laid out so, else a copy."""
    rows, vocab_size = logits_RV.shape
    step = logits_RV.stride(1)
    room = logits_RV.untyped_storage().nbytes() // 4 - logits_RV.storage_offset()
    if logits_RV.stride(0) == 1 and step % lanes == 0 and step >= padded and room >= step * (vocab_size - 1) + padded:
        return logits_RV.as_strided((vocab_size, padded), (step, 1)).numpy()
    panels_VR = np.zeros((vocab_size, padded), np.float32)
    panels_VR[:, :rows] = logits_RV.numpy().T
    return panels_VR


def sample_torch(logits_RV: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """The definition."""
    raw_lse_R = log_sum_exp(logits_RV)
    final_RV = process(logits_RV, batch)
    scores_RV = final_RV
    greedy_R = batch.temperatures_R == 0
    if not greedy_R.all():
        noise_RV = noise.gumbel(on_device(batch.words_R2, logits_RV.device), logits_RV.shape[1])
        if greedy_R.any():
            noise_RV.masked_fill_(on_device(greedy_R, logits_RV.device)[:, None], 0)
        scores_RV = final_RV + noise_RV
    token_R1 = scores_RV.argmax(-1, keepdim=True)
    raw_R = logits_RV.gather(1, token_R1)[:, 0] - raw_lse_R
    if final_RV is logits_RV:
        lse_R, logprobs_R = raw_lse_R, raw_R
    else:
        lse_R = log_sum_exp(final_RV)
        logprobs_R = final_RV.gather(1, token_R1)[:, 0] - lse_R
    return Sampled(
        token_R1[:, 0],
        logprobs_R,
        raw_R,
        ~(torch.isfinite(raw_lse_R) & torch.isfinite(lse_R)),
        {
            row: likeliest(logits_RV[row], raw_lse_R[row], k) if raw else likeliest(final_RV[row], lse_R[row], k)
            for row, k, raw in batch.num_top_R
        },
    )


def process(logits_RV: torch.Tensor, batch: SamplingBatch, team: "Team | None" = None) -> torch.Tensor:
    """Logits of the distribution each row is drawn from; `logits_RV` itself when no row changes anything."""
    scale_R, truncated_R = batch.scales_R, batch.truncated_R
    scaled, truncated = bool((scale_R != 1).any()), bool(truncated_R.any())
    if not (scaled or truncated or batch.penalized or batch.masked):
        return logits_RV
    x_RV = logits_RV.clone()
    for row, sequence, ahead in batch.penalized:
        history_T = on_device(np.array(sequence.token_ids + sequence.draft[:ahead], np.int64), x_RV.device)
        if sequence.in_flight:
            assert batch.drawn_ids is not None
            history_T = torch.cat([history_T, batch.drawn_ids[sequence.drawn_row, None]])
        penalize(x_RV[row], history_T, sequence.num_prompt, sequence.request.params)
    for row, ids in batch.masked:
        x_RV[row].index_fill_(0, on_device(np.array(ids, np.int64), x_RV.device), -torch.inf)
    if scaled:
        x_RV /= on_device(scale_R, x_RV.device)[:, None]
    if truncated:
        rows_S = np.flatnonzero(truncated_R)
        index_S = on_device(rows_S, x_RV.device)
        x_SV = x_RV if len(rows_S) == len(x_RV) else x_RV[index_S]
        limits = [a[rows_S] for a in (batch.top_k_R, batch.top_p_R, batch.min_p_R)]
        if team is not None:
            from inference.kernels import cpu_truncation
            from inference.kernels.cpu_team import new_signals

            team.run(cpu_truncation.truncate, new_signals(1), x_SV.numpy(), *limits)
        else:
            kept_SV = kept_tokens(x_SV, *(on_device(a, x_RV.device) for a in limits))
            x_SV.masked_fill_(~kept_SV, -torch.inf)
        if x_SV is not x_RV:
            x_RV[index_S] = x_SV
    return x_RV


def penalize(x_V: torch.Tensor, history_T: torch.Tensor, num_prompt: int, params: SamplingParams) -> None:
    """In place. Repetition counts prompt and output, once a distinct token; the other two count output alone.

    Nothing is read back from the device: the newest token may be known there alone.
    """
    if params.repetition_penalty != 1:
        x_T = x_V[history_T]
        # A token that comes twice is written twice, with the same value.
        x_V[history_T] = torch.where(x_T < 0, x_T * params.repetition_penalty, x_T / params.repetition_penalty)
    output_T = history_T[num_prompt:]
    if len(output_T) and (params.frequency_penalty or params.presence_penalty):
        counts_V = torch.zeros(len(x_V), dtype=torch.float64, device=x_V.device)
        counts_V.index_add_(0, output_T, torch.ones_like(output_T, dtype=torch.float64))
        counts_T = counts_V[output_T]
        x_V[output_T] -= (params.frequency_penalty * counts_T + params.presence_penalty).float()


def kept_tokens(
    x_SV: torch.Tensor, top_k_S: torch.Tensor, top_p_S: torch.Tensor, min_p_S: torch.Tensor
) -> torch.Tensor:
    """[S, V] bool. Ties are broken by the lower id, so top_k keeps exactly k; one token is always kept."""
    vocab_size = x_SV.shape[1]
    sorted_SV, order_SV = x_SV.sort(dim=-1, descending=True, stable=True)
    limit_S1 = torch.where(top_k_S > 0, top_k_S, vocab_size)[:, None]
    kept_SV = torch.arange(vocab_size, device=x_SV.device) < limit_S1
    mass_SV = sorted_SV.masked_fill(~kept_SV, -torch.inf).softmax(-1)
    before_SV = mass_SV.cumsum(-1).roll(1, -1)
    before_SV[:, 0] = 0
    kept_SV &= (before_SV < top_p_S[:, None]) | (top_p_S >= 1)[:, None]
    kept_SV &= mass_SV >= min_p_S[:, None] * mass_SV[:, :1]
    return torch.zeros_like(kept_SV).scatter_(1, order_SV, kept_SV)
