"""Which fate a sample meets, and what the learner sees of a group."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from olmorl.contract.generation import FinishReason, RolloutSample
from olmorl.controller.admission import judge, keep_signal, token_versions, train_samples
from olmorl.controller.advantage import carries_signal
from olmorl.controller.group import Fate, Group, ScoredSample
from olmorl.data.prompt import Check, Prompt

PROMPT = Prompt(
    index=7,
    token_ids=np.array([1, 4, 13], np.int32),
    text="1+",
    checks=(Check("gsm8k", "2"),),
    data_source="sums",
    epoch=0,
    position=3,
)


def sample(index: int, reward: float | None, *, finish_reason: FinishReason = "stop") -> ScoredSample:
    num_tokens = index + 2
    return ScoredSample(
        sample=RolloutSample(
            request_id="0_7",
            lease=1,
            sample_index=index,
            worker="inference-0",
            token_ids=np.arange(num_tokens, dtype=np.int32),
            logprobs=np.full(num_tokens, -0.5, np.float32),
            raw_logprobs=np.full(num_tokens, -0.5, np.float32),
            version_spans=((4, 0, 1), (6, 1, num_tokens)),
            text="",
            finish_reason=finish_reason,
        ),
        reward=reward,
        verdict="error" if reward is None else "scored",
    )


def group(*samples: ScoredSample) -> Group:
    return Group(prompt=PROMPT, order=0, admitted_version=4, seed=1, t_admitted=0.0, samples=list(samples))


def judged(*samples: ScoredSample, mask_truncated: bool = False) -> tuple[bool, list[Fate | None]]:
    signal = judge(group(*samples), scale=1.0, kind="centered", mask_truncated=mask_truncated)
    return signal, [s.fate for s in samples]


def test_a_group_with_signal_is_trained() -> None:
    samples = [sample(0, 1.0), sample(1, 0.0)]
    assert judged(*samples) == (True, [Fate.TRAINED, Fate.TRAINED])
    assert [s.advantage for s in samples] == [0.5, -0.5]


def test_equal_rewards_carry_none() -> None:
    assert judged(sample(0, 1.0), sample(1, 1.0)) == (False, [Fate.ZERO_VARIANCE, Fate.ZERO_VARIANCE])


def test_a_sample_without_a_score_leaves_the_group() -> None:
    samples = [sample(0, 1.0), sample(1, None), sample(2, 0.0), sample(3, None, finish_reason="abort")]
    assert judged(*samples) == (True, [Fate.TRAINED, Fate.ERROR, Fate.TRAINED, Fate.ABORTED])
    assert [s.advantage for s in samples] == [0.5, 0.0, -0.5, 0.0], "it counted as a zero"


def test_one_score_alone_carries_no_signal() -> None:
    assert judged(sample(0, 1.0), sample(1, None)) == (False, [Fate.ZERO_VARIANCE, Fate.ERROR])
    assert judged(sample(0, None), sample(1, None)) == (False, [Fate.ERROR, Fate.ERROR])


def test_a_verdict_without_a_score_costs_what_the_policy_says() -> None:
    def outcome(action: str, *, finish_reason: FinishReason = "stop") -> tuple[bool, list[Fate | None], list[float]]:
        samples = [sample(0, 1.0), sample(1, None, finish_reason=finish_reason), sample(2, 0.0)]
        policy = {"timeout": "drop_sample", "error": action, "unscorable": "drop_sample"}
        signal = judge(group(*samples), scale=3.0, kind="centered", mask_truncated=False, unscored=policy)
        assert samples[1].reward is None, "what was not scored is written down as such"
        return signal, [s.fate for s in samples], [s.advantage for s in samples]

    trained, error = Fate.TRAINED, Fate.ERROR
    assert outcome("drop_sample") == (True, [trained, error, trained], [1.5, 0.0, -1.5])
    assert outcome("drop_group") == (False, [error, error, error], [0.0, 0.0, 0.0])
    assert outcome("zero") == (True, [trained, trained, trained], [2.0, -1.0, -1.0])
    for action in ("drop_group", "zero"):  # what an engine gave up is no verdict
        assert outcome(action, finish_reason="abort") == (True, [trained, Fate.ABORTED, trained], [1.5, 0.0, -1.5])


def test_of_a_fixed_draw_the_surplus_is_dropped() -> None:
    rewards = [(1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)]
    groups = [group(sample(0, first), sample(1, second)) for first, second in rewards]
    for made in groups:
        made.has_signal = judge(made, scale=1.0, kind="centered", mask_truncated=False)
    assert keep_signal(groups, at_most=4) == ([groups[0], groups[2], groups[4]], [groups[1], groups[3]])
    kept, others = keep_signal(groups, at_most=2)
    assert kept == [groups[0], groups[2]]
    fates = [made.samples[0].fate for made in others]
    assert fates == [Fate.ZERO_VARIANCE, Fate.ZERO_VARIANCE, Fate.SURPLUS]


def test_truncated_samples_are_compared_and_masked() -> None:
    samples = [sample(0, 1.0), sample(1, 0.0, finish_reason="length")]
    assert judged(*samples, mask_truncated=True) == (True, [Fate.TRAINED, Fate.TRUNCATED])
    assert samples[0].advantage == 0.5, "the truncated one is part of the mean"
    assert len(train_samples(group(*samples))) == 1
    assert judged(*samples) == (True, [Fate.TRAINED, Fate.TRAINED])


def test_rewards_are_scaled() -> None:
    samples = [sample(0, 1.0), sample(1, 0.0)]
    judge(group(*samples), scale=10.0, kind="centered", mask_truncated=False)
    assert [s.advantage for s in samples] == [5.0, -5.0]


def test_what_the_learner_sees() -> None:
    samples = [sample(0, 1.0), sample(1, None), sample(2, 0.0)]
    made = group(*samples)
    judge(made, scale=1.0, kind="centered", mask_truncated=False)
    first, last = train_samples(made)
    np.testing.assert_array_equal(first.prompt_token_ids, PROMPT.token_ids)
    assert (first.advantage, last.advantage) == (0.5, -0.5)
    assert first.loss_mask.all() and first.loss_mask.shape == first.token_ids.shape
    assert token_versions(samples[2]).tolist() == last.token_versions.tolist() == [4, 6, 6, 6]


@given(st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=1, max_size=8), st.booleans())
def test_every_sample_meets_exactly_one_fate(rewards: list[float | None], mask_truncated: bool) -> None:
    samples = [sample(i, reward, finish_reason="length" if i % 2 else "stop") for i, reward in enumerate(rewards)]
    signal, fates = judged(*samples, mask_truncated=mask_truncated)
    assert signal is carries_signal([r for r in rewards if r is not None])
    for reward, fate in zip(rewards, fates, strict=True):
        assert (fate is Fate.ERROR) == (reward is None)
        assert reward is None or (fate in (Fate.TRAINED, Fate.TRUNCATED)) is signal
    assert abs(sum(s.advantage for s in samples)) < 1e-5
