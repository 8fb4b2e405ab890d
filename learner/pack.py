"""Lay the samples of a step one behind the other, in micro-batches, for every rank: policy, no torch.

Samples of one prompt stay together where balance allows, and share it: the prompt is laid and computed once for them.

Two balances matter. Ranks must have about equal work, because the slowest one sets the time of the step, and they must
have equal numbers of micro-batches of about equal work, because each one runs collectives that all ranks join. Work is
FLOPs: of the weights for each token, of attention for each pair. A rank that has fewer samples than micro-batches gets
empty ones (no document): it runs the collectives and adds nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from olmorl.contract.training import MicroBatch, MiniBatch, RankBatch, TrainSample

UNITS_PER_RANK = 16  # samples of one prompt are parted into so small shares that ranks can be balanced


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
        _pack_one(samples[begin:end], num_ranks, tokens_per_micro_batch, attention_tokens, first=begin)
        for begin, end in pairwise(bounds)
    ]
    return [RankBatch(version=version, mini_batches=of_rank) for of_rank in zip(*mini_batches, strict=True)]


def unpack(batches: Sequence[RankBatch], values: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
    """[T] float32 for each sample of so many `lengths` that was packed into `batches`, from a value for each trained
    token of each rank, in order; NaN at tokens that are not trained."""
    unpacked = [np.full(length, np.nan, np.float32) for length in lengths]
    for batch, of_rank in zip(batches, values, strict=True):
        taken = 0
        for micro in batch.micro_batches:
            for sample, (start, end) in zip(micro.samples, pairwise(micro.document_starts), strict=True):
                if sample < 0:
                    continue
                trained = micro.loss_mask[max(start, end - lengths[sample]) : end]
                count = int(trained.sum())
                unpacked[sample][trained] = of_rank[taken : taken + count]
                taken += count
        assert taken == len(of_rank), f"{len(of_rank)} values for {taken} trained tokens"
    return unpacked


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples of one prompt that stay together."""

    samples: list[int]
    tokens: int
    cost: float


def _pack_one(
    samples: Sequence[TrainSample], num_ranks: int, limit: int, attention_tokens: float, *, first: int
) -> list[MiniBatch]:
    """Every rank's share of one optimizer step."""
    num_tokens = sum(map(_length, samples))
    size = limit if num_ranks == 1 else min(limit, num_tokens // (num_ranks * UNITS_PER_RANK))
    units = _units(samples, size, attention_tokens)
    units.sort(key=lambda unit: -unit.tokens)  # stable: equals keep their order
    shares = _spread(units, num_ranks)
    fewest = [_first_fit(share, limit) for share in shares]
    depth = max(len(bins) for bins in fewest)
    num_loss_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    batches = []
    for share, bins in zip(shares, fewest, strict=True):
        bins = _level(share, limit, depth) or bins + [[] for _ in range(depth - len(bins))]
        bins.sort(key=lambda bin: -sum(unit.cost for unit in bin))  # the ranks' heavy ones meet
        micro_batches = tuple(_lay(samples, [i for unit in bin for i in unit.samples], first) for bin in bins)
        batches.append(MiniBatch(micro_batches=micro_batches, num_loss_tokens=num_loss_tokens))
    return batches


def _units(samples: Sequence[TrainSample], size: int, attention_tokens: float) -> list[_Unit]:
    """Samples that share a prompt, as many together as `size` tokens hold, at least one."""
    units = []
    for members in _by_prompt(samples):
        prompt = len(samples[members[0]].prompt_token_ids)
        chunk: list[int] = []
        tokens = prompt
        for index in members:
            response = len(samples[index].token_ids)
            if chunk and tokens + response > size:
                units.append(_unit(samples, chunk, attention_tokens))
                chunk, tokens = [], prompt
            chunk.append(index)
            tokens += response
        units.append(_unit(samples, chunk, attention_tokens))
    return units


def _unit(samples: Sequence[TrainSample], members: list[int], attention_tokens: float) -> _Unit:
    prompt = len(samples[members[0]].prompt_token_ids)
    responses = [len(samples[i].token_ids) for i in members]
    tokens = prompt + sum(responses)
    pairs = prompt**2 + sum(response * (response + 2 * prompt) for response in responses)
    return _Unit(members, tokens, tokens + pairs / attention_tokens)


def _by_prompt(samples: Sequence[TrainSample]) -> list[list[int]]:
    """Indices of the samples of each prompt, prompts as they first appear."""
    groups: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(np.asarray(sample.prompt_token_ids, np.int32).tobytes(), []).append(index)
    return list(groups.values())


def _lay(samples: Sequence[TrainSample], chosen: Sequence[int], first: int) -> MicroBatch:
    """Those `chosen` of `samples`, which are packed behind `first` others."""
    return concatenate([samples[i] for i in chosen], places=[first + i for i in chosen])


def concatenate(samples: Sequence[TrainSample], *, places: Sequence[int] | None = None) -> MicroBatch:
    """Lay `samples` one behind the other, a prompt that several have but once. None at all make the empty one.
    `places` they have among all that are packed; as they stand here if not given."""
    places = range(len(samples)) if places is None else places
    pieces: list[_Piece] = []
    for members in _by_prompt(samples):
        prompt = samples[members[0]].prompt_token_ids
        if len(members) == 1:
            pieces.append(_Piece(prompt, samples[members[0]], places[members[0]], parent=-1, before=0))
            continue
        parent = len(pieces)
        pieces.append(_Piece(prompt, None, -1, parent=-1, before=0))
        pieces += [_Piece(prompt[:0], samples[i], places[i], parent=parent, before=len(prompt)) for i in members]
    lengths = [piece.length for piece in pieces]
    document_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens = int(document_starts[-1])
    micro_batch = MicroBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        position_ids=np.zeros(num_tokens, np.int32),
        document_starts=document_starts,
        parents=np.array([piece.parent for piece in pieces], np.int32),
        samples=np.array([piece.place for piece in pieces], np.int32),
        loss_mask=np.zeros(num_tokens, bool),
        advantages=np.zeros(num_tokens, np.float32),
        behaviour_logprobs=np.zeros(num_tokens, np.float32),
        token_versions=np.full(num_tokens, -1, np.int32),
    )
    for piece, start in zip(pieces, document_starts[:-1].tolist(), strict=True):
        piece.lay(micro_batch, start)
    return micro_batch


@dataclass(frozen=True, slots=True)
class _Piece:
    """A document: prompt tokens, then the response of a sample; either may be missing."""

    prompt: np.ndarray
    sample: TrainSample | None
    place: int
    parent: int
    before: int
    """tokens of the parent"""

    @property
    def length(self) -> int:
        return len(self.prompt) + (0 if self.sample is None else len(self.sample.token_ids))

    def lay(self, micro_batch: MicroBatch, start: int) -> None:
        response = slice(start + len(self.prompt), start + self.length)
        micro_batch.token_ids[start : response.start] = self.prompt
        micro_batch.position_ids[start : response.stop] = self.before + np.arange(self.length)
        if self.sample is not None:
            micro_batch.token_ids[response] = self.sample.token_ids
            micro_batch.loss_mask[response] = self.sample.loss_mask
            micro_batch.advantages[response] = self.sample.advantage
            micro_batch.behaviour_logprobs[response] = self.sample.logprobs
            micro_batch.token_versions[response] = self.sample.token_versions


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


def _spread(units: Sequence[_Unit], num_ranks: int) -> list[list[_Unit]]:
    """In order, each to the lightest rank."""
    shares: list[list[_Unit]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for unit in units:
        rank = loads.index(min(loads))
        shares[rank].append(unit)
        loads[rank] += unit.cost
    return shares


def _first_fit(units: Sequence[_Unit], limit: int) -> list[list[_Unit]]:
    """In order, each to the first bin that has room: few bins."""
    bins: list[list[_Unit]] = []
    rooms: list[int] = []
    for unit in units:
        target = next((b for b, room in enumerate(rooms) if room >= unit.tokens), None)
        if target is None:
            bins.append([])
            rooms.append(limit)
            target = len(bins) - 1
        bins[target].append(unit)
        rooms[target] -= unit.tokens
    return bins


def _level(units: Sequence[_Unit], limit: int, num_bins: int) -> list[list[_Unit]] | None:
    """In order, each to the lightest bin that has room; None where this way finds no room for all."""
    bins: list[list[_Unit]] = [[] for _ in range(num_bins)]
    rooms, loads = [limit] * num_bins, [0.0] * num_bins
    for unit in units:
        fitting = [b for b in range(num_bins) if rooms[b] >= unit.tokens or not bins[b]]
        if not fitting:
            return None
        target = min(fitting, key=lambda b: loads[b])
        bins[target].append(unit)
        rooms[target] -= unit.tokens
        loads[target] += unit.cost
    return bins
