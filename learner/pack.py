"""Lay the samples of a step one behind the other, in micro-batches, for every rank: policy, no torch.

Two balances matter. Ranks must have about equal tokens, because the slowest one sets the time of the step, and they
must have equal numbers of micro-batches, because each one runs collectives that all ranks join. A rank that has fewer
gets empty micro-batches (no document): it runs the collectives and adds nothing.
"""

from collections.abc import Sequence

import numpy as np

from olmorl.contract.training import MicroBatch, RankBatch, TrainSample


def pack(
    samples: Sequence[TrainSample], *, version: int, num_ranks: int, tokens_per_micro_batch: int
) -> list[RankBatch]:
    """One batch for each rank. Every sample is in exactly one; one longer than the limit has a micro-batch of its own.

    The heaviest and the lightest rank differ by at most the longest sample.
    """
    if num_ranks < 1 or tokens_per_micro_batch < 1:
        raise ValueError(
            f"num_ranks = {num_ranks} and tokens_per_micro_batch = {tokens_per_micro_batch} must both be >= 1"
        )
    for index, sample in enumerate(samples):
        _check(sample, index)
    lengths = [_length(sample) for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: -lengths[i])  # stable: equal lengths keep their order
    shares = _spread(order, lengths, num_ranks)
    bins = [_first_fit(share, lengths, tokens_per_micro_batch) for share in shares]
    depth = max(len(rank_bins) for rank_bins in bins)
    num_loss_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    return [
        RankBatch(
            version=version,
            micro_batches=tuple(
                concatenate([samples[i] for i in indices]) for indices in rank_bins + [[]] * (depth - len(rank_bins))
            ),
            num_loss_tokens=num_loss_tokens,
        )
        for rank_bins in bins
    ]


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


def _spread(order: Sequence[int], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Longest first, each to the lightest rank."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in order:
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def _first_fit(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """First fit, longest first: few bins, and documents of like length together, which pads attention less."""
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
