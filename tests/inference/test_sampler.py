"""The sampler against fixed vectors, a brute-force reference, and the frequencies it must produce."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from inference import noise
from inference.kernels.cpu_team import Team
from inference.request import Request
from inference.sampler import SamplingBatch, SamplingTable, kept_tokens, process, sample
from olmorl.contract.generation import SamplingParams


def batch_of(
    params: list[SamplingParams], *, outputs: list[list[int]] | None = None, prompt: tuple[int, ...] = (0,)
) -> SamplingBatch:
    table = SamplingTable(len(params))
    sequences = []
    for row, one in enumerate(params):
        request = Request(str(row), list(prompt), one, row, one.seed or 0, (0,), stop_ids=frozenset(), max_tokens=99)
        sequence = request.sequences[0]
        sequence.token_ids += outputs[row] if outputs else []
        sequence.row = row
        table.set(sequence)
        sequences.append(sequence)
    return table.batch(sequences)


def support(probs: list[float], params: SamplingParams) -> set[int]:
    logits = torch.tensor([probs]).log()
    twin, compiled = (process(logits, batch_of([params]), team) for team in (None, Team(1)))
    assert torch.equal(twin, compiled)
    return set(torch.isfinite(twin[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("probs", "params", "kept"),
    [
        ([0.5, 0.25, 0.125, 0.125], {"top_p": 0.75}, {0, 1}),
        ([0.5, 0.25, 0.15, 0.1], {"top_k": 2, "top_p": 0.6}, {0}),
        ([0.4, 0.3, 0.2, 0.1], {"min_p": 0.6, "top_p": 0.5}, {0, 1}),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 1}, {0}),
        ([0.1, 0.3, 0.3, 0.3], {"top_k": 2}, {1, 2}),
        ([0.1, 0.9], {"top_p": 1e-6}, {1}),
        ([0.1, 0.9], {"top_p": 1e-50}, {1}),
        ([0.1, 0.9], {"min_p": 1.0}, {1}),
        ([0.1, 0.9], {}, {0, 1}),
    ],
)
def test_support_vectors(probs: list[float], params: dict[str, float], kept: set[int]) -> None:
    assert support(probs, SamplingParams(**params)) == kept  # type: ignore[arg-type]


def test_penalty_vector() -> None:
    params = SamplingParams(repetition_penalty=2, frequency_penalty=0.1, presence_penalty=0.2)
    logits = torch.tensor([[2.0, -1, 0.5, 0]])
    found = process(logits, batch_of([params], outputs=[[3, 3]], prompt=(0, 1)))
    torch.testing.assert_close(found, torch.tensor([[1.0, -2, 0.5, -0.4]]))
    assert logits.tolist() == [[2.0, -1, 0.5, 0]]


@pytest.fixture(scope="module", params=["torch", "compiled", "compiled_by_two"])
def team(request: pytest.FixtureRequest) -> Team | None:
    return {"torch": None, "compiled": Team(1), "compiled_by_two": Team(2)}[request.param]


def test_logprob_vectors(team: Team | None) -> None:
    logits = torch.tensor([[2.0, 1, 0]]).repeat(4, 1)
    params = [SamplingParams(temperature=t, top_k=k) for t, k in ((1, 1), (0.5, 1), (1, 2), (0, 0))]
    found = sample(logits, batch_of(params), team)
    np.testing.assert_allclose(found.raw_logprobs_R[[0, 1, 3]], -0.4076, atol=1e-4)
    np.testing.assert_allclose(found.logprobs_R[[0, 1, 3]], [0, 0, -0.4076], atol=1e-4)
    half = process(logits[:1], batch_of([SamplingParams(temperature=0.5)])).log_softmax(-1)
    two = process(logits[:1], batch_of([SamplingParams(top_k=2)])).log_softmax(-1)
    assert half[0, 0].item() == pytest.approx(-0.1429, abs=1e-4)
    assert two[0, 0].item() == pytest.approx(-0.3133, abs=1e-4)


def brute_force(weights: list[int], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The rules with exact integers: weights are masses of a dyadic distribution."""
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = order[:top_k] if top_k else order
    total, before, kept = sum(weights[i] for i in order), 0, []
    for i in order:
        if top_p < 1 and kept and not before < top_p * total:
            break
        kept.append(i)
        before += weights[i]
    return {i for i in kept if weights[i] >= min_p * weights[order[0]]}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
    st.integers(0, 12),
    st.sampled_from([0.125, 0.25, 0.5, 0.75, 1.0]),
    st.sampled_from([0.0, 0.0625, 0.25, 0.5, 1.0]),
)
def test_support_equals_brute_force(exponents: list[int], top_k: int, top_p: float, min_p: float) -> None:
    weights = [2**e for e in exponents]
    weights.append(2 ** math.ceil(math.log2(sum(weights) + 1)) - sum(weights))  # dyadic masses: sums are exact
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k and 0 < top_k < len(weights):  # after top_k the masses are renormalised and no longer dyadic
        total, before = sum(weights[i] for i in order[:top_k]), 0
        for i in order[:top_k]:
            if abs(before / total - top_p) < 1e-5:
                return
            before += weights[i]
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    probs = [weight / sum(weights) for weight in weights]
    assert support(probs, params) == brute_force(weights, top_k, top_p, min_p)


def draws(logits_V: torch.Tensor, count: int, team: Team | None, *, seed: int = 0, **rules: float) -> np.ndarray:
    positions = np.arange(count)
    rows = 1 << 14
    key = np.array([noise.sequence_key((seed, 1), 0)], np.uint64)
    found = []
    for start in range(0, count, rows):
        part = positions[start : start + rows]
        size = len(part)
        batch = SamplingBatch(
            np.full(size, rules.get("temperature", 1), np.float32),
            np.full(size, rules.get("top_k", 0), np.int64),
            np.full(size, rules.get("top_p", 1), np.float32),
            np.full(size, rules.get("min_p", 0), np.float32),
            noise.row_words(np.repeat(key, size), part),
        )
        found.append(sample(logits_V.expand(size, -1), batch, team).token_ids_R)
    return np.concatenate(found)


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_frequencies(team: Team | None, rules: dict[str, float]) -> None:
    logits = torch.randn(9, generator=torch.Generator().manual_seed(2)) * 1.5
    batch = batch_of([SamplingParams(**rules)])  # type: ignore[arg-type]
    expected = process(logits[None], batch)[0].softmax(-1).double().numpy()
    counts = np.bincount(draws(logits, 100_000, team, **rules), minlength=9)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    frequencies = expected[kept] / expected[kept].sum() * counts.sum()
    assert stats.chisquare(counts[kept], frequencies).pvalue > 1e-4


def test_a_rare_token_comes_at_its_rate() -> None:
    rare = 2.0**-20
    count = 1 << 24
    key = np.array([noise.sequence_key((5, 9), 0)], np.uint64)
    log_odds = math.log(rare / (1 - rare))
    hits = 0
    for start in range(0, count, 1 << 20):
        words = noise.row_words(np.repeat(key, 1 << 20), np.arange(start, start + (1 << 20)))
        gumbel = noise.gumbel(torch.from_numpy(words), 2)
        hits += int((gumbel[:, 1] + log_odds > gumbel[:, 0]).sum())
    assert stats.poisson.cdf(hits, count * rare) > 1e-4 and stats.poisson.sf(hits - 1, count * rare) > 1e-4


def test_each_rare_token_comes_at_its_rate_from_the_compiled_kernel() -> None:
    """4095 tokens of probability 2**-20 beside one that has the rest."""
    vocab_size, rows, rare = 4096, 2048, 2.0**-20
    logits_VR = torch.zeros(vocab_size, rows)
    logits_VR[77] = math.log((1 - (vocab_size - 1) * rare) / rare)
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.int64)
    counts = np.zeros(vocab_size, np.int64)
    for seed in range(256):
        words = noise.row_words(np.full(rows, noise.sequence_key((seed, 1), 0), np.uint64), np.arange(rows))
        batch = SamplingBatch(ones, zeros, ones, zeros.astype(np.float32), words)
        counts += np.bincount(sample(logits_VR.T, batch, Team(1)).token_ids_R, minlength=vocab_size)
    expected = 256 * rows * rare
    hits = counts.sum() - counts[77]
    assert abs(hits - expected * (vocab_size - 1)) < 5 * math.sqrt(expected * vocab_size)
    parts = np.delete(counts, 77).reshape(63, 65).sum(1)
    assert stats.chisquare(parts).pvalue > 1e-4


RULES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.integers(1, 9),
        "top_p": st.sampled_from([0.1, 0.9]),
        "min_p": st.sampled_from([0.05, 0.5]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 1.0]),
        "logprobs": st.integers(1, 3),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(RULES, min_size=1, max_size=20), st.sampled_from([7, 64, 5000]), st.booleans(), st.integers(0, 1 << 30))
def test_compiled_draws_the_tokens_of_its_twin(
    rules: list[dict[str, float]], vocab_size: int, by_column: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rules), vocab_size, generator=generator) * 4
    logits[:, 3] = -torch.inf
    batch = batch_of(
        [SamplingParams(seed=seed + i, **r) for i, r in enumerate(rules)],  # type: ignore[arg-type]
        outputs=[[i % 7, 2, 2] for i in range(len(rules))],
    )
    given_logits = logits.T.contiguous().T if by_column else logits
    before = given_logits.clone()
    fast, slow = sample(given_logits, batch, Team(1)), sample(logits, batch)
    assert torch.equal(given_logits, before)
    np.testing.assert_array_equal(fast.token_ids_R, slow.token_ids_R)
    np.testing.assert_allclose(fast.logprobs_R, slow.logprobs_R, atol=1e-5)
    np.testing.assert_allclose(fast.raw_logprobs_R, slow.raw_logprobs_R, atol=1e-5)
    assert fast.top.keys() == slow.top.keys()
    for row, (ids_K, _) in slow.top.items():
        assert fast.top[row][0].tolist() == ids_K.tolist()


def test_extreme_bits_give_finite_noise_and_never_draw_a_masked_token(team: Team | None) -> None:
    bits = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    values = noise.exponential(bits)
    assert torch.isfinite(values).all() and (values > 0).all()
    assert (values[1:] >= values[:-1]).all(), "few bits set mean little noise: the winning tail is the precise one"
    assert torch.isfinite(-torch.log(values)).all()
    masked = torch.tensor([0.0, -torch.inf, -80.0])
    assert (draws(masked, 1 << 17, team) == 0).all()


def test_noise_is_keyed_by_all_of_its_parts() -> None:
    def row(seed: int, prompt: list[int], sample_index: int, position: int) -> tuple[float, ...]:
        from inference.request import prompt_noise_key

        key = noise.sequence_key(prompt_noise_key(seed, prompt), sample_index)
        words = noise.row_words(np.array([key], np.uint64), np.array([position]))
        return tuple(noise.gumbel(torch.from_numpy(words), 8)[0].tolist())

    rows = {row(s, p, i, t) for s in (0, 1) for p in ([1], [1, 2]) for i in (0, 1) for t in (0, 1)}
    assert len(rows) == 16
    assert len({value for one in rows for value in one}) == 128


def test_noise_bits_are_uniform_across_rows_and_tokens() -> None:
    key = np.array([noise.sequence_key((3, 4), 0)], np.uint64)
    words = noise.row_words(np.repeat(key, 4096), np.arange(4096))
    bits = noise.hash_tokens(torch.from_numpy(words), 64).numpy()
    for counts in (np.bincount((bits >> 24).ravel(), minlength=256), np.bincount((bits & 255).ravel(), minlength=256)):
        assert stats.chisquare(counts).pvalue > 1e-4
    pairs = (bits[:, :-1] >> 28) * 16 + (bits[:, 1:] >> 28)
    assert stats.chisquare(np.bincount(pairs.ravel(), minlength=256)).pvalue > 1e-4


def test_rows_do_not_depend_on_their_neighbours(team: Team | None) -> None:
    generator = torch.Generator().manual_seed(1)
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0),
        SamplingParams(seed=2, temperature=0.5, top_k=3),
        SamplingParams(seed=3, top_p=0.5, repetition_penalty=1.5),
        SamplingParams(seed=4, min_p=0.3, frequency_penalty=0.5, logprobs=2),
    ]
    logits = torch.randn(len(params), 11, generator=generator) * 3
    outputs = [[1], [2, 2], [3], [4, 5, 4], [6, 6]]
    together = sample(logits, batch_of(params, outputs=outputs), team)
    for row, one in enumerate(params):
        alone = sample(logits[row : row + 1], batch_of([one], outputs=[outputs[row]]), team)
        assert alone.token_ids_R[0] == together.token_ids_R[row]
        assert float(alone.logprobs_R[0]) == pytest.approx(float(together.logprobs_R[row]), abs=1e-6)
    assert len(together.top[4][0]) == 2 and together.top[4][1][0] >= together.top[4][1][1]


def test_broken_rows_are_told_apart(team: Team | None) -> None:
    logits = torch.zeros(5, 3)
    logits[4] = -torch.inf
    logits[1, 2] = torch.nan
    logits[2, 0] = torch.inf
    logits[3, 0] = -torch.inf
    assert sample(logits, batch_of([SamplingParams()] * 5), team).broken_R.tolist() == [False, True, True, False, True]


def test_greedy_takes_the_lowest_of_equals(team: Team | None) -> None:
    logits = torch.zeros(1, 40)
    logits[0, [7, 21]] = 3
    assert sample(logits, batch_of([SamplingParams(temperature=0)]), team).token_ids_R[0] == 7


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 400),
    st.sampled_from([0, 1, 2, 17, 500]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-3, 0.3, 1.0]),
    st.sampled_from([0.01, 1.0, 8.0, 60.0]),
    st.integers(0, 1 << 30),
)
def test_compiled_truncation_equals_its_twin(
    vocab_size: int, top_k: int, top_p: float, min_p: float, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=generator) * spread
    logits[1] = logits[1].round()  # ties
    logits[2, ::2] = -torch.inf
    logits[2, -1] = 0
    batch = batch_of([SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)] * 3)
    fast, slow = process(logits, batch, Team(1)), process(logits, batch)
    masses = slow.softmax(-1)
    for row in range(3):  # rounding may decide for a token whose mass is nothing
        differ = torch.isfinite(fast[row]) != torch.isfinite(slow[row])
        edge = logits[row].softmax(-1)[differ].sum()
        assert edge < 1e-6 and masses[row, differ].sum() < 1e-6, differ.nonzero()
    same = torch.isfinite(fast) & torch.isfinite(slow)
    assert torch.equal(fast[same], logits[same])


def test_kept_tokens_always_keeps_one() -> None:
    x = torch.tensor([[0.0, 5.0, 1.0]])
    kept = kept_tokens(x, torch.tensor([1]), torch.tensor([1e-9]), torch.tensor([1.0]))
    assert kept.tolist() == [[False, True, False]]
