"""A sample that lived through updates, preemption and recomputing is drawn again from its record alone."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

from inference.engine import Engine
from inference.request import Sequence
from inference.rollout_replay import RecordedTurn, RolloutReplay, effective_events, needed_versions, replay_rollout
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, KvEvent, SamplingParams

PARAMS = SamplingParams(n=3, max_tokens=60, seed=11, temperature=0.9, ignore_eos=True)


@pytest.fixture(scope="module")
def crowded(model_folder: str) -> tuple[EngineConfig, list[Sequence]]:
    """Twelve samples in a pool for five, updates of both kinds every few steps, prompts cut into chunks."""
    config = EngineConfig(
        model=model_folder, max_num_seqs=6, kv_cache_tokens=240, block_size=4, max_tokens_per_step=10, threads=1
    )
    engine = Engine(config)
    rng = np.random.default_rng(5)
    done: list[Sequence] = []
    for number in range(4):
        prompt = rng.integers(0, 20, int(rng.integers(3, 40))).tolist()
        engine.add(str(number), prompt, replace(PARAMS, seed=number))
    steps, version = 0, 0
    while engine.has_unfinished:
        done += engine.step()
        steps += 1
        if steps % 7 == 0 and version < 12:
            version += 1
            engine.update_weights(weights(engine, version), version, kv="recompute" if version % 4 == 0 else "keep")
            if version % 5 == 0:  # nothing is computed between these two
                version += 1
                engine.update_weights(weights(engine, version), version)
    return config, done


def weights(engine: Engine, version: int) -> Iterable[tuple[str, torch.Tensor]]:
    rng = np.random.default_rng(version)
    for spec in engine.decoder.specs:
        yield spec.name, torch.from_numpy(rng.normal(0, 0.2, spec.shape).astype(np.float32))


def again(config: EngineConfig, sample: Sequence, *, unlike: int | None = None, **changes: object) -> RolloutReplay:
    """`unlike`: a version whose weights are not those of the run."""
    request = sample.request
    turn = RecordedTurn(
        start=0,
        prompt_token_ids=np.array(request.prompt, np.int32),
        token_ids=np.array(sample.output_ids, np.int32),
        logprobs=np.array(sample.logprobs, np.float32),
        kv_events=tuple(sample.kv_events),
    )
    reference = Engine(replace(config, kv_cache_tokens=64))
    return replay_rollout(
        replace(config, max_tokens_per_step=33),
        request.params,
        sample=sample.sample_index,
        turns=[replace(turn, **changes)],  # type: ignore[arg-type]
        weights=lambda version: weights(reference, 99 if version == unlike else version),
    )


def test_whatever_befell_it(crowded: tuple[EngineConfig, list[Sequence]]) -> None:
    config, samples = crowded
    kinds = [kind for sample in samples for _, _, kind in sample.kv_events]
    assert kinds.count("swap") > 20 and kinds.count("recompute") > 15
    assert any(version == 6 for sample in samples for _, version, _ in sample.kv_events)
    swaps = [(p, s.num_prompt) for s in samples for p, _, kind in s.kv_events if kind == "swap"]
    assert any(position < prompt for position, prompt in swaps), "no update met a prompt half computed"
    for sample in samples:
        report = again(config, sample)
        assert report.divergence is None, (str(report), sample.kv_events)
        assert report.tokens == len(sample.output_ids) == 60
        assert report.logprob_difference < 1e-5


def test_whatever_befell_it_in_a_run_with_drafts(crowded: tuple[EngineConfig, list[Sequence]]) -> None:
    """Several tokens a step would go past where the record has an update."""
    config, samples = crowded
    for sample in samples:
        assert again(replace(config, speculative="model", draft_model=config.model), sample).divergence is None


def test_every_event_of_the_record_counts(crowded: tuple[EngineConfig, list[Sequence]]) -> None:
    """Left out, moved by a token, or with other weights: then it comes out otherwise."""
    config, samples = crowded
    sample = max(samples, key=lambda s: len(effective_events(s.kv_events)))
    events = effective_events(sample.kv_events)
    assert len(events) > 5
    for at, (position, version, kind) in enumerate(events[1:], start=1):
        if any(later[2] == "recompute" for later in events[at + 1 : at + 2]):
            continue  # what is computed anew soon after may show in no token
        changed = again(config, sample, unlike=version)
        first = min(position, sample.num_tokens) - sample.num_prompt
        assert changed.tokens >= max(first - 1, 0), "it differs before the event"
        if kind == "swap" and position > sample.num_prompt:
            assert _differs(changed) or changed.logprob_difference > 1e-3, (at, kind)
    moved = [*events[:1], *((p - 1 if k == "swap" and p > 1 else p, v, k) for p, v, k in events[1:])]
    other = again(config, sample, kv_events=tuple(moved))
    assert _differs(other) or other.logprob_difference > 1e-4


def _differs(report: RolloutReplay) -> bool:
    return report.divergence is not None


def test_the_first_token_that_differs_is_told(crowded: tuple[EngineConfig, list[Sequence]]) -> None:
    config, samples = crowded
    sample = samples[0]
    token_ids = np.array(sample.output_ids, np.int32)
    token_ids[17] = (token_ids[17] + 1) % 20
    report = again(config, sample, token_ids=token_ids)
    assert report.tokens == 17
    assert str(report).startswith(f"diverged at token 17: {token_ids[17]} (logprob ")
    assert f"in the run, {sample.output_ids[17]} (logprob " in str(report)


def test_a_record_that_contradicts_itself_is_refused(crowded: tuple[EngineConfig, list[Sequence]]) -> None:
    config, samples = crowded
    events: tuple[KvEvent, ...] = ((0, 0, "prefill"), (70, 1, "swap"), (60, 2, "swap"))
    sample = next(s for s in samples if s.num_prompt < 30)
    with pytest.raises(ConfigError, match="contradicts itself: swap at position 60"):
        again(config, sample, kv_events=events, token_ids=np.array(draw(config, sample, events[:2]), np.int32))


def draw(config: EngineConfig, sample: Sequence, events: tuple[KvEvent, ...]) -> list[int]:
    """The tokens of `sample` under other events."""
    engine = Engine(config)
    request = engine.add("0", sample.request.prompt, sample.request.params, sample_indices=(sample.sample_index,))
    [own] = request.sequences
    for position, version, _ in events[1:]:
        while own.num_computed < position:
            engine.step()
        engine.update_weights(weights(engine, version), version)
    while engine.has_unfinished:
        engine.step()
    return own.output_ids


def test_weights_that_nothing_was_computed_with_are_not_needed() -> None:
    events: tuple[KvEvent, ...] = (
        (0, 1, "prefill"), (4, 2, "swap"), (4, 3, "swap"), (9, 4, "swap"), (10, 5, "recompute"), (10, 6, "recompute"),
        (12, 7, "swap"), (14, 8, "recompute"),
    )  # fmt: skip
    kept = [(0, 1, "prefill"), (4, 3, "swap"), (10, 6, "recompute"), (12, 7, "swap"), (14, 8, "recompute")]
    assert effective_events(events) == kept
    nothing = np.zeros(0, np.int32)
    turn = RecordedTurn(start=0, prompt_token_ids=nothing, token_ids=nothing, logprobs=nothing, kv_events=events)
    assert needed_versions([turn, replace(turn, kv_events=((0, 8, "prefill"),))]) == [1, 3, 6, 7, 8]
