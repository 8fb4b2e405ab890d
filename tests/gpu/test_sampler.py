"""The Triton sampler against its definition: same tokens, same logprobs, same kept tokens, whatever the rules."""

import itertools
import math

import numpy as np
import pytest
import torch

from inference import noise
from inference.gpu_sampling import GpuSampler
from inference.kernels.gpu_sampler import CHUNK, Draw, draw_launches
from inference.kernels.gpu_truncation import truncation_launch
from inference.request import Request, Sequence
from inference.sampler import SamplingBatch, SamplingTable, kept_tokens, sample_torch
from olmorl.contract.generation import SamplingParams


def sequences_of(params: list[SamplingParams], outputs: list[list[int]] | None = None) -> list[Sequence]:
    sequences = []
    for row, one in enumerate(params):
        request = Request(str(row), [0, 1, 2], one, row, one.seed or 0, (0,), stop_ids=frozenset({5}), max_tokens=99)
        sequence = request.sequences[0]
        sequence.token_ids += outputs[row] if outputs else []
        sequence.row = row
        sequences.append(sequence)
    return sequences


def batch_of(sequences: list[Sequence]) -> SamplingBatch:
    table = SamplingTable(len(sequences))
    for sequence in sequences:
        table.set(sequence)
    return table.batch(sequences)


def random_logits(device: torch.device, rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn((rows, size), generator=torch.Generator().manual_seed(seed)).to(device)


def assert_equal(sampler: GpuSampler, logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    ours, theirs = sampler.sample(logits_RV, batch), sample_torch(logits_RV, batch)
    assert ours.token_ids_R.tolist() == theirs.token_ids_R.tolist()
    torch.testing.assert_close(ours.logprobs_R, theirs.logprobs_R, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.raw_logprobs_R, theirs.raw_logprobs_R, atol=1e-5, rtol=1e-5)
    assert ours.broken_R.tolist() == theirs.broken_R.tolist()
    for row, (ids_K, logprobs_K) in theirs.top.items():
        assert ours.top[row][0].tolist() == ids_K.tolist()
        torch.testing.assert_close(ours.top[row][1], logprobs_K, atol=1e-5, rtol=1e-5)
    return ours.token_ids_R


@pytest.mark.parametrize("size", [7, CHUNK, 2 * CHUNK + 13])
def test_temperature_alone(device: torch.device, size: int) -> None:
    params = [SamplingParams(temperature=t, seed=9) for t in (0, 1e-6, 0.3, 1, 7)]
    logits = random_logits(device, len(params), size)
    assert_equal(GpuSampler(size, device), logits, batch_of(sequences_of(params)))


RULES = [
    {},
    {"temperature": 0},
    {"top_k": 1},
    {"top_k": 50, "temperature": 1.7},
    {"top_p": 0.9},
    {"top_k": 9, "top_p": 0.6},
    {"min_p": 0.05},
    {"min_p": 0.3, "top_p": 0.95, "top_k": 40},
    {"repetition_penalty": 1.3, "frequency_penalty": -0.2, "presence_penalty": 0.4, "top_p": 0.8},
    {"repetition_penalty": 0.7, "temperature": 0},
    {"min_tokens": 9, "max_tokens": 20, "logprobs": 3, "top_k": 2},
    {"logprobs": 4, "frequency_penalty": 0.5},
]


def test_all_rules_together_over_steps(device: torch.device) -> None:
    """Counts live on the device: after each draw they must be what the sequence says."""
    size = 2 * CHUNK + 100
    sequences = sequences_of([SamplingParams(seed=3, **rules) for rules in RULES], [[7, 7, 4095]] * len(RULES))
    sampler = GpuSampler(size, device)
    for step in range(3):
        logits = random_logits(device, len(sequences), size, seed=step)
        logits[:, [1, 7, 9]] += 9  # what is penalised is also what is likely
        tokens = assert_equal(sampler, logits, batch_of(sequences))
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.token_ids.append(token)
    sequences[8].token_ids[-1] = 11  # another sequence takes the slot
    sequences[8] = sequences_of([SamplingParams(seed=3, **rules) for rules in RULES])[8]
    sequences[9].token_ids += [1, 1]  # two steps that were drawn elsewhere
    logits = random_logits(device, len(sequences), size)
    logits[:, [0, 1, 7, 11]] += 9
    assert_equal(sampler, logits, batch_of(sequences))


def kept(device: torch.device, x_RV: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    rows = len(x_RV)
    limits = [
        torch.full((rows,), value, dtype=dtype, device=device)
        for value, dtype in ((top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32))
    ]
    threshold, last = torch.empty(rows, device=device), torch.empty(rows, dtype=torch.int32, device=device)
    truncation_launch(x_RV, *limits, threshold, last).run()
    ids = torch.arange(x_RV.shape[1], device=device)
    ours = (x_RV > threshold[:, None]) | ((x_RV == threshold[:, None]) & (ids <= last[:, None]))
    theirs = kept_tokens(x_RV, limits[0].long(), *limits[1:])
    assert torch.equal(ours, theirs), (top_k, top_p, min_p, ours.sum(1), theirs.sum(1))
    return ours


@pytest.mark.parametrize(
    ("probs", "rules", "expected"),
    [
        ([0.5, 0.25, 0.125, 0.125], (0, 0.75, 0), {0, 1}),
        ([0.5, 0.25, 0.15, 0.1], (2, 0.6, 0), {0}),
        ([0.4, 0.3, 0.2, 0.1], (0, 0.5, 0.6), {0, 1}),
        ([0.25, 0.25, 0.25, 0.25], (1, 1, 0), {0}),
        ([0.1, 0.3, 0.3, 0.3], (2, 1, 0), {1, 2}),
        ([0.25, 0.25, 0.25, 0.25], (0, 0.6, 0), {0, 1, 2}),
        ([0.1, 0.9], (0, 1e-6, 0), {1}),
        ([0.1, 0.9], (0, 1, 1), {1}),
    ],
)
def test_support_vectors(
    device: torch.device, probs: list[float], rules: tuple[int, float, float], expected: set[int]
) -> None:
    found = kept(device, torch.tensor([probs], device=device).log(), *rules)
    assert set(found[0].nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), list(itertools.product((0, 3, 2000), (1.0, 0.7), (0.0, 0.01))))
def test_support_of_ties_and_infinities(device: torch.device, top_k: int, top_p: float, min_p: float) -> None:
    """Few distinct values, so that ties lie at every threshold; masked tokens; zeros of both signs."""
    x = (2 * random_logits(device, 3, 1500)).round() / 2
    x[0, ::3] = -torch.inf
    x[1] = torch.where(x[1] == 0, -0.0, x[1])
    x[2, 5:] = -torch.inf
    kept(device, x, top_k, top_p, min_p)


def test_rows_that_are_no_distribution(device: torch.device) -> None:
    logits = random_logits(device, 4, CHUNK + 9)
    logits[0, 3], logits[1, CHUNK + 1], logits[2] = torch.nan, torch.inf, -torch.inf
    for rules in ({}, {"top_p": 0.5, "top_k": 3}, {"temperature": 0}):
        batch = batch_of(sequences_of([SamplingParams(seed=1, **rules)] * 4))
        assert GpuSampler(CHUNK + 9, device).sample(logits, batch).broken_R.tolist() == [True, True, True, False]


def test_noise_is_the_engines_at_the_ends_of_the_hash(device: torch.device) -> None:
    """The hash gives every 32-bit value; the rarest noise wins, and w = 1 must stay finite."""
    size = CHUNK
    words = torch.tensor([[7, 2**31 + 5], [2**32 - 1, 2**32 - 1]])
    draw = Draw(torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((2, 4), device=device))
    zeros, greedy = torch.zeros((2, size), device=device), torch.zeros(2, dtype=torch.int32, device=device)
    packed = torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32)).to(device)
    for launch in draw_launches(zeros, None, torch.ones(2, device=device), greedy, packed, None, None, draw):
        launch.run()
    assert draw.token_ids_R.tolist() == noise.gumbel(words, size).argmax(1).tolist()
    np.testing.assert_allclose(draw.scores_R4[:, 0].cpu(), [-math.log(size)] * 2, atol=1e-5)


def test_tokens_in_flight_are_counted(device: torch.device) -> None:
    """The host does not know the newest token yet; the draw before does, or the slot is another one since."""
    rules = {"repetition_penalty": 1.5, "frequency_penalty": 0.7}
    sequences = sequences_of([SamplingParams(seed=seed, **rules) for seed in (1, 2)], [[3], [4, 4]])
    sampler = GpuSampler(60, device)
    first = sampler.sample(random_logits(device, 2, 60), batch_of(sequences))
    for row, sequence in enumerate(sequences):
        sequence.in_flight, sequence.drawn_row = 1, row
    logits = random_logits(device, 2, 60, seed=1)
    logits[:, [3, 4]] += 5
    logits[[0, 1], first.token_ids_R] += 6
    table = SamplingTable(2)
    for fresh in (False, True):
        for sequence in sequences:
            table.set(sequence)
        batch = table.batch(sequences, first.token_ids_R)
        assert_equal(GpuSampler(60, device) if fresh else sampler, logits, batch)
