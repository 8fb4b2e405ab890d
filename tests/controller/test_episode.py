"""However turns and observations alternate: the tokens are theirs, each with its own logprob and version."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.pack import pack
from olmorl.contract.generation import OBSERVED, RolloutSample
from olmorl.controller.admission import token_versions, train_samples
from olmorl.controller.episode import Episode
from olmorl.controller.group import Fate, Group, ScoredSample
from olmorl.data.prompt import Check, Prompt

PROMPT = np.array([1, 2, 3], np.int32)


def turn(tokens: list[int], versions: list[int]) -> RolloutSample:
    starts = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    spans = tuple((versions[a], a, b) for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True))
    return RolloutSample(
        request_id="0_7",
        lease=1,
        sample_index=2,
        worker="w",
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        raw_logprobs=-2 * np.array(tokens, np.float32),
        version_spans=spans,
        text="",
        finish_reason="stop",
        kv_events=((0, versions[0] if versions else 0, "prefill"),),
        t_first_token=float(tokens[0]) if tokens else 0.0,
        t_finished=9.0,
    )


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[RolloutSample, list[int]]]:
    """(turn, observation) again and again; versions only grow."""
    version, pairs = 0, []
    for _ in range(draw(st.integers(1, 4))):
        versions = []
        for _ in range(draw(st.integers(1, 5))):
            version += draw(st.integers(0, 1))
            versions.append(version)
        tokens = draw(st.lists(st.integers(4, 99), min_size=len(versions), max_size=len(versions)))
        pairs.append((turn(tokens, versions), draw(st.lists(st.integers(4, 99), max_size=3))))
    return pairs


@given(episodes())
def test_every_token_keeps_what_was_recorded_of_it(pairs: list[tuple[RolloutSample, list[int]]]) -> None:
    episode = Episode(PROMPT, max_tokens=100)
    expected: list[tuple[int, int, float, bool]] = []  # token, version, logprob, drawn
    for sample, observation in pairs:
        assert episode.room == 100 - len(expected)
        episode.draw(sample, "t")
        for version, start, end in sample.version_spans:
            expected += [(int(t), version, -float(t), True) for t in sample.token_ids[start:end]]
        if sample is not pairs[-1][0]:
            episode.observe(np.array(observation, np.int32), "o")
            expected += [(t, OBSERVED, 0.0, False) for t in observation]
    whole = episode.sample("stop")
    scored = ScoredSample(sample=whole, reward=1.0, verdict="scored", drawn=episode.drawn, fate=Fate.TRAINED)
    ids, versions = whole.token_ids.tolist(), token_versions(scored).tolist()
    assert list(zip(ids, versions, whole.logprobs.tolist(), scored.loss_mask.tolist(), strict=True)) == expected
    assert [0, *(end for *_, end in whole.version_spans)] == [*(start for _, start, _ in whole.version_spans), len(ids)]
    assert all(a[0] != b[0] for a, b in zip(whole.version_spans, whole.version_spans[1:], strict=False))
    assert episode.context.tolist() == [*PROMPT.tolist(), *ids]
    assert whole.text == "o".join("t" * len(pairs)) and whole.t_first_token == pairs[0][0].t_first_token
    assert len(whole.kv_events) == len(pairs)

    prompt = Prompt(
        index=0, token_ids=PROMPT, text="", checks=(Check("gsm8k", "1"),), data_source="s", epoch=0, position=0
    )
    group = Group(prompt=prompt, order=0, admitted_version=0, seed=0, t_admitted=0.0, samples=[scored])
    (batch,) = pack(train_samples(group), version=0, num_ranks=1, tokens_per_micro_batch=64)
    (micro,) = batch.micro_batches
    assert batch.num_loss_tokens == scored.num_drawn == sum(drawn for *_, drawn in expected)
    response = micro.loss_mask[-len(ids) :]
    assert response.tolist() == episode.drawn.tolist() and not micro.loss_mask[: -len(ids)].any()
