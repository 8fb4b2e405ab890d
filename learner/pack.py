"""Lay the samples of a step one behind the other, in micro-batches, for every rank: policy, no torch.

Two balances matter. Ranks must have about equal work, because the slowest one sets the time of the step, and they must
have equal numbers of micro-batches of about equal work, because each one runs collectives that all ranks join. Work is
FLOPs: of the weights for each token, of attention for each pair. A rank that has fewer samples than micro-batches gets
empty ones (no document): it runs the collectives and adds nothing.
"""

import math
from collections.abc import Sequence

import numpy as np

from olmorl.contract.training import MicroBatch, MiniBatch, RankBatch, TrainSample


def pack(
    samples: Sequence[TrainSample],
    *,
    version: int,
    num_ranks: int,
    tokens_per_micro_batch: int,
    num_mini_batches: int = 1,
    attention_tokens: float = math.inf,
) -> list[RankBatch]:
    """One batch for each rank. Every sample is in exactly one; one longer than the limit has a micro-batch of its own.

    Mini-batches are runs of the samples as they came, of equal numbers but for one; more than there are samples is as
    many as there are. In each, the heaviest and the lightest rank differ by at most the heaviest sample.
    `attention_tokens` is the length at which attention costs a sample as much as the weights do.
    """
    if min(num_ranks, tokens_per_micro_batch, num_mini_batches) < 1:
        raise ValueError(
            f"num_ranks = {num_ranks}, tokens_per_micro_batch = {tokens_per_micro_batch} and num_mini_batches = "
            f"{num_mini_batches} must all be >= 1"
        )
    for index, sample in enumerate(samples):
        _check(sample, index)
    count = max(1, min(num_mini_batches, len(samples)))
    bounds = [len(samples) * i // count for i in range(count + 1)]
    mini_batches = [
        _pack_one(samples[begin:end], num_ranks, tokens_per_micro_batch, attention_tokens)
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return [RankBatch(version=version, mini_batches=of_rank) for of_rank in zip(*mini_batches, strict=True)]


def _pack_one(samples: Sequence[TrainSample], num_ranks: int, limit: int, attention_tokens: float) -> list[MiniBatch]:
    """Every rank's share of one optimizer step."""
    lengths = [_length(sample) for sample in samples]
    costs = [length * (1 + length / attention_tokens) for length in lengths]
    order = sorted(range(len(samples)), key=lambda i: -lengths[i])  # stable: equal lengths keep their order
    shares = _spread(order, costs, num_ranks)
    fewest = [_first_fit(share, lengths, limit) for share in shares]
    depth = max(len(rank_bins) for rank_bins in fewest)
    num_loss_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    batches = []
    for share, bins in zip(shares, fewest, strict=True):
        bins = _level(share, lengths, costs, limit, depth) or bins + [[] for _ in range(depth - len(bins))]
        bins.sort(key=lambda indices: -sum(costs[i] for i in indices))  # the ranks' heavy ones meet
        micro_batches = tuple(concatenate([samples[i] for i in indices]) for indices in bins)
        batches.append(MiniBatch(micro_batches=micro_batches, num_loss_tokens=num_loss_tokens))
    return batches


def concatenate(samples: Sequence[TrainSample]) -> MicroBatch:
    """Lay `samples` one behind the other. None at all make the empty micro-batch."""
    lengths = np.array([_length(sample) for sample in samples], dtype=np.int32)
    document_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens = int(document_starts[-1])
    micro_batch = MicroBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        position_ids=np.zeros(num_tokens, np.int32),
        document_starts=document_starts,
        loss_mask=np.zeros(num_tokens, bool),
        advantages=np.zeros(num_tokens, np.float32),
        behaviour_logprobs=np.zeros(num_tokens, np.float32),
        token_versions=np.full(num_tokens, -1, np.int32),
    )
    for sample, start, end in zip(samples, document_starts[:-1], document_starts[1:], strict=True):
        response = slice(start + len(sample.prompt_token_ids), end)
        micro_batch.token_ids[start : response.start] = sample.prompt_token_ids
        micro_batch.token_ids[response] = sample.token_ids
        micro_batch.position_ids[start:end] = np.arange(end - start)
        micro_batch.loss_mask[response] = sample.loss_mask
        micro_batch.advantages[response] = sample.advantage
        micro_batch.behaviour_logprobs[response] = sample.logprobs
        micro_batch.token_versions[response] = sample.token_versions
    return micro_batch


def _length(sample: TrainSample) -> int:
    return len(sample.prompt_token_ids) + len(sample.token_ids)


def _check(sample: TrainSample, index: int) -> None:
    if len(sample.prompt_token_ids) == 0:
        raise ValueError(f"sample {index} has an empty prompt; its first token has nothing to be predicted from")
    for name in ("logprobs", "token_versions", "loss_mask"):
        if len(getattr(sample, name)) != len(sample.token_ids):
            raise ValueError(
                f"sample {index}: {name} has {len(getattr(sample, name))} entries for {len(sample.token_ids)} tokens"
            )


def _spread(order: Sequence[int], costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Heaviest first, each to the lightest rank."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for index in order:
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return shares


def _first_fit(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """First fit, longest first: few bins."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index in order:
        target = next((b for b, room in enumerate(rooms) if room >= lengths[index]), None)
        if target is None:
            bins.append([])
            rooms.append(limit)
            target = len(bins) - 1
        bins[target].append(index)
        rooms[target] -= lengths[index]
    return bins


def _level(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], limit: int, num_bins: int
) -> list[list[int]] | None:
    """Heaviest first, each to the lightest bin that has room; None where this way finds no room for all."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    rooms, loads = [limit] * num_bins, [0.0] * num_bins
    for index in order:
        open_bins = [b for b in range(num_bins) if rooms[b] >= lengths[index] or not bins[b]]
        if not open_bins:
            return None
        target = min(open_bins, key=lambda b: loads[b])
        bins[target].append(index)
        rooms[target] -= lengths[index]
        loads[target] += costs[index]
    return bins
