"""The engine as its users see it: seeds, stopping, errors that stay with their request, accounting."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference import LLM, SamplingParams
from olmorl.contract.errors import ModelError

CHARACTERS = "0123456789+=-abcdefgh"
EOS = len(CHARACTERS)
PROMPTS = [[1, 10, 2, 11], [3, 10, 4, 10, 5, 11], [9] * 17, [0]]


def tokens(outs) -> list[list[list[int]]]:  # type: ignore[no-untyped-def]
    return [[sample.token_ids for sample in out.samples] for out in outs]


def test_same_seed_same_tokens_in_any_batch(model_folder: str) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=30)
    expected = tokens(LLM(model_folder).generate(PROMPTS, params))
    assert len({tuple(sample) for out in expected for sample in out}) > 12, "samples of one group differ"
    for index, prompt in enumerate(PROMPTS):
        alone = LLM(model_folder, prefix_caching=False, seed=99).generate([prompt], params)
        assert tokens(alone) == [expected[index]]
        one = LLM(model_folder).generate([prompt], SamplingParams(n=1, seed=3, max_tokens=30))
        assert tokens(one)[0][0] == expected[index][0], "sample 0 of n = 4 is n = 1"
    crowded = LLM(model_folder, max_num_seqs=5, kv_cache_tokens=96, block_size=4, max_tokens_per_step=7)
    for prompt in PROMPTS:
        crowded.add_request(prompt, SamplingParams(max_tokens=20))
    assert tokens(crowded.generate(PROMPTS, params)) == expected
    assert crowded.stats()["preemptions"] > 0


def test_unseeded_requests_draw_from_engine_seed_and_arrival(model_folder: str) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first = tokens(LLM(model_folder, seed=1).generate([PROMPTS[0]] * 2, params))
    assert first == tokens(LLM(model_folder, seed=1).generate([PROMPTS[0]] * 2, params))
    assert first[0] != first[1]
    assert first != tokens(LLM(model_folder, seed=2).generate([PROMPTS[0]] * 2, params))


def test_prompt_of_a_group_is_prefilled_once(model_folder: str) -> None:
    llm = LLM(model_folder, max_num_seqs=3)
    llm.generate(PROMPTS, SamplingParams(n=8, max_tokens=5, ignore_eos=True))
    stats = llm.stats()
    prompt_tokens = sum(map(len, PROMPTS))
    assert stats["prefill_tokens_computed"] == prompt_tokens
    assert stats["prefill_tokens_shared"] == 7 * prompt_tokens
    assert stats["output_tokens"] == 8 * 4 * 5
    assert stats["kv_usage"] == 0 and stats["running"] == stats["waiting"] == 0


def test_a_subset_of_samples_equals_those_of_the_whole_group(model_folder: str) -> None:
    params = SamplingParams(n=6, seed=8, max_tokens=12)
    llm = LLM(model_folder)
    whole = tokens(llm.generate([PROMPTS[1]], params))[0]
    llm.engine.add("some", PROMPTS[1], params, sample_indices=(4, 1))
    done = {}
    while llm.engine.has_unfinished:
        done.update({sequence.sample_index: sequence.output_ids for sequence in llm.engine.step()})
    assert done == {4: whole[4], 1: whole[1]}


def drawn(model_folder: str, prompt: list[int], **options: object) -> list[int]:
    params = SamplingParams(seed=0, max_tokens=40, ignore_eos=True, **options)  # type: ignore[arg-type]
    return LLM(model_folder).generate([prompt], params)[0].samples[0].token_ids


def test_eos_on_the_last_token_is_stop_and_is_not_in_the_text(model_folder: str) -> None:
    for seed in range(50):
        params = SamplingParams(seed=seed, max_tokens=40)
        sample = LLM(model_folder).generate([PROMPTS[0]], params)[0].samples[0]
        if sample.finish_reason == "stop":
            break
    length = len(sample.token_ids)
    assert sample.token_ids[-1] == EOS and EOS not in sample.token_ids[:-1]
    assert sample.text == "".join(CHARACTERS[token] for token in sample.token_ids[:-1])
    exact = LLM(model_folder).generate([PROMPTS[0]], SamplingParams(seed=seed, max_tokens=length))[0].samples[0]
    assert exact.finish_reason == "stop" and len(exact.logprobs) == length
    if length > 1:
        short = LLM(model_folder).generate([PROMPTS[0]], SamplingParams(seed=seed, max_tokens=length - 1))[0].samples[0]
        assert short.finish_reason == "length" and len(short.token_ids) == length - 1
    held = SamplingParams(seed=seed, max_tokens=60, min_tokens=length + 3)
    longer = LLM(model_folder).generate([PROMPTS[0]], held)[0].samples[0]
    assert EOS not in longer.token_ids[: length + 3] and len(longer.token_ids) > length


def test_stop_ids_and_strings(model_folder: str) -> None:
    plain = drawn(model_folder, PROMPTS[0])
    text = "".join(CHARACTERS[token] for token in plain if token != EOS)
    ids = drawn(model_folder, PROMPTS[0], stop_token_ids=(plain[5],))
    assert ids == plain[: plain.index(plain[5]) + 1]
    stop = text[8:11]  # spans three tokens
    params = SamplingParams(seed=0, max_tokens=40, ignore_eos=True, stop=("never", stop))
    sample = LLM(model_folder).generate([PROMPTS[0]], params)[0].samples[0]
    assert sample.finish_reason == "stop" and sample.text == text[: text.index(stop)]
    assert sample.token_ids == plain[: len(sample.token_ids)]
    late = SamplingParams(seed=0, max_tokens=40, ignore_eos=True, stop=(stop,), min_tokens=12)
    sample = LLM(model_folder).generate([PROMPTS[0]], late)[0].samples[0]
    assert len(sample.token_ids) >= 12, "not looked for until min_tokens stand"


def test_a_request_that_outgrows_the_pool_alone_ends_by_itself(model_folder: str) -> None:
    llm = LLM(model_folder, kv_cache_tokens=32, block_size=4)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (90, 8)]
    large, small = llm.generate([[1, 2, 3], [4, 5]], params)
    assert large.finish_reason == "abort" and "outgrew the KV pool" in str(large.error)
    assert len(large.samples[0].token_ids) == 32 - 3 + 1
    assert small.finish_reason == "length" and llm.stats()["kv_usage"] == 0


def test_nan_logits_end_their_request_alone(model_folder: str) -> None:
    healthy = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    good = [[1, 2, 3], [4, 5]]
    expected = tokens(LLM(model_folder).generate(good, healthy))
    llm = LLM(model_folder)
    poison = min(set(range(EOS)) - {token for out in expected for sample in out for token in sample} - {1, 2, 3, 4, 5})
    llm.engine.decoder.embedding[poison] = torch.nan  # whoever contains this id, and nobody else, gets NaN logits
    outs = llm.generate([good[0], [1, poison], good[1]], [healthy, SamplingParams(n=3), healthy])
    assert outs[1].finish_reason == "abort" and "not finite" in str(outs[1].error)
    assert [sample.token_ids for sample in outs[1].samples] == [[], [], []]
    assert tokens([outs[0], outs[2]]) == expected
    assert outs[0].error is None and llm.stats()["kv_usage"] == 0
    assert tokens(llm.generate(good, healthy)) == expected


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 7)), max_size=5),
    st.sampled_from([28, 40, 80]),
    st.sampled_from(["continuous", "static"]),
)
def test_abort_at_any_moment(model_folder: str, aborts: list[tuple[int, int]], pool: int, batching: str) -> None:
    llm = LLM(model_folder, kv_cache_tokens=pool, block_size=4, max_tokens_per_step=16, batching=batching)
    params = SamplingParams(n=2, seed=2, max_tokens=9, ignore_eos=True)
    prompts = [PROMPTS[i % 4][:9] for i in range(8)]
    expected = tokens(LLM(model_folder).generate(prompts, params))
    rids = [llm.add_request(prompt, params) for prompt in prompts]
    done, gone = {}, set()
    for step in range(500):
        if not llm.has_unfinished():
            break
        for rid in [rids[index] for when, index in aborts if when == step]:
            assert llm.abort(rid) == (rid not in gone)
            gone.add(rid)
        for out in llm.step():
            done[out.request_id] = out
            gone.add(out.request_id)
    assert set(done) == set(rids)
    aborted = {rids[index] for _, index in aborts}
    for rid, samples in zip(rids, expected, strict=True):
        for sample, full in zip(done[rid].samples, samples, strict=True):
            assert sample.token_ids == full[: len(sample.token_ids)]
            assert sample.finish_reason == "length" if rid not in aborted else True
    assert llm.stats()["kv_usage"] == 0 and len(llm.engine.scheduler.free_rows) == 64


def test_version_spans_and_kv_events(model_folder: str) -> None:
    llm = LLM(model_folder)
    llm.add_request(PROMPTS[0], SamplingParams(max_tokens=6, ignore_eos=True))
    names = {name: tensor.clone() for name, tensor in llm.engine.decoder.tensors.items()}
    llm.step()
    llm.update_weights(names.items(), version=4)
    llm.step()
    llm.update_weights(names.items(), version=5)
    llm.update_weights(names.items(), version=6, kv="recompute")
    outs = []
    while llm.has_unfinished():
        outs += llm.step()
    sample = outs[0].samples[0]
    assert sample.version_spans == [(0, 0, 1), (4, 1, 2), (6, 2, 6)]
    assert sample.kv_events == [(0, 0, "prefill"), (4, 4, "swap"), (5, 5, "swap"), (6, 6, "recompute")]


def test_top_logprobs(model_folder: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    sample = LLM(model_folder).generate([PROMPTS[0]], params)[0].samples[0]
    assert [len(top) for top in sample.top_logprobs] == [3] * 4
    assert [top[0][0] for top in sample.top_logprobs] == sample.token_ids
    np.testing.assert_allclose([top[0][1] for top in sample.top_logprobs], sample.logprobs, atol=1e-6)


def test_models_that_cannot_be_served_are_named(model_folder: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match="not a folder"):
        LLM(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match="'mamba'; supported are llama, olmo2, olmo3, qwen2, qwen3"):
        LLM(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable as JSON"):
        LLM(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        LLM(str(tmp_path))
    for name in ("/" + "a" * 300, "~nobody-of-this-name/model"):
        with pytest.raises(ModelError, match="not a folder"):
            LLM(name)
    (tmp_path / "config.json").write_bytes(Path(model_folder, "config.json").read_bytes())
    for index in ("{", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ModelError, match="index"):
            LLM(str(tmp_path))


def test_policy_modules_import_without_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, inference, inference.request, inference.scheduler, inference.block_allocator,"
        " inference.prefix_cache; from inference import SamplingParams; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
