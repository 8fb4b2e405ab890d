"""Bugs that other engines shipped, each as a test of ours, by the number of the survey they were collected in.

 1-3   prefix KV of old weights reused after an update     test_weight_update.py: new_request_after_update..., and here
 4, 5  logprobs at T = 1, or logprobs divided by T         test_transformers.py: temperature_logprobs...
 6     log S of truncation unaccounted for                 here
 7, 8  penalties on wrong or wrongly counted history       test_sampler.py: penalty_vector, and here
 9     a full prefix hit leaves nothing to compute         test_scheduler.py: prefix_hit_leaves..., and here
11     prompt logprobs of cached positions                 test_transformers.py: score_and_prompt_logprobs
12     logprob rows mixed up by chunked prefill            here
14     rare tokens cut off by float32 noise                test_sampler.py: a_rare_token_comes_at_its_rate
15     ties over-accepted, thresholds off by one           test_sampler.py: support_vectors
17     top_k and top_p joint in one path only              test_sampler.py: support_equals_brute_force
18     slot -1 writes the last KV slot                     here
19     stale tails of a batch that shrank                  here
22     flush refused or broken by requests in flight       here
23     tokens behind a stop leak                           test_stopping.py
25     rules that need history after a preemption          here
28     generation_config changes sampling                  here
29     reload replaces tensors                             test_weight_update.py: equal_weights...
30     weights written while a forward runs                here
31     top_p summed in bfloat16                            here
35     a copy of the head stale after an update            here

The others concern quantisation, speculation, tensor parallelism, sleep and CUDA graphs.
"""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference import LLM, SamplingParams
from inference.engine_thread import EngineThread
from inference.staged_update import stage_tensors

PROMPT = [1, 10, 2, 11]
PROMPTS = [PROMPT, [3, 10, 4, 10, 5, 11], [9] * 17, [0]]
RULES = SamplingParams(
    seed=5,
    max_tokens=24,
    min_tokens=10,
    repetition_penalty=1.4,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    logprobs=2,
)


def weights(llm: LLM, scale: float = 0.0, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in llm.engine.decoder.tensors.items()
    }


def samples(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [sample.token_ids for out in llm.generate(prompts, params) for sample in out.samples]


def test_01_to_03_no_update_of_many_leaves_a_stale_prefix(model_folder: str) -> None:
    llm = LLM(model_folder, block_size=2)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for version in range(1, 18):
        update = weights(llm, scale=0.02, seed=version)
        llm.update_weights(update.items(), version=version)
        (out,) = llm.generate([PROMPTS[2]], params)
        scores = llm.score([np.array(out.prompt_token_ids + out.samples[0].token_ids)])[0]
        np.testing.assert_allclose(out.samples[0].raw_logprobs, scores[len(PROMPTS[2]) - 1 :], atol=1e-5)
        assert out.samples[0].kv_events == [(0, version, "prefill")]


def test_06_processed_is_raw_minus_the_log_of_the_mass_kept(model_folder: str) -> None:
    params = SamplingParams(seed=1, max_tokens=30, top_k=5, logprobs=5, ignore_eos=True)
    sample = LLM(model_folder).generate([PROMPT], params)[0].samples[0]
    for logprob, raw, top in zip(sample.logprobs, sample.raw_logprobs, sample.top_logprobs, strict=True):
        assert sum(np.exp(value) for _, value in top) == pytest.approx(1, abs=1e-5), "all five that are left"
        assert logprob > raw
    plain = LLM(model_folder).generate([PROMPT], SamplingParams(seed=1, max_tokens=30, ignore_eos=True))[0].samples[0]
    assert plain.logprobs == plain.raw_logprobs


def test_07_08_25_penalties_and_min_tokens_in_any_batch_and_after_preemption(model_folder: str) -> None:
    expected = [LLM(model_folder).generate([prompt], RULES)[0].samples[0] for prompt in PROMPTS]
    plain = samples(LLM(model_folder), PROMPTS, SamplingParams(seed=5, max_tokens=24))
    assert [sample.token_ids for sample in expected] != plain, "the rules show"
    crowded = LLM(model_folder, kv_cache_tokens=60, block_size=4, max_tokens_per_step=6)
    others = [crowded.add_request(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
    for _ in range(3):
        crowded.step()
    outs = crowded.generate(PROMPTS, RULES)
    assert crowded.stats()["preemptions"] > 0 and others
    for out, alone in zip(outs, expected, strict=True):
        assert out.samples[0].token_ids == alone.token_ids
        np.testing.assert_allclose(out.samples[0].logprobs, alone.logprobs, atol=1e-5)
        assert [[t for t, _ in top] for top in out.samples[0].top_logprobs] == [
            [t for t, _ in top] for top in alone.top_logprobs
        ]


def test_09_a_prompt_that_is_cached_whole_is_answered_like_a_cold_one(model_folder: str) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 6
    llm = LLM(model_folder, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    cold, warm = (llm.generate([prompt], params)[0].samples[0] for _ in range(2))
    assert llm.stats()["prefix_hits"] == 32 and llm.stats()["prefill_tokens_computed"] == 48 + 16
    assert warm.token_ids == cold.token_ids
    np.testing.assert_allclose(warm.raw_logprobs, cold.raw_logprobs, atol=1e-5)


def test_12_prompt_logprobs_belong_to_their_tokens_in_mixed_chunked_steps(model_folder: str) -> None:
    llm = LLM(model_folder, max_tokens_per_step=5, block_size=4)
    prompts = [*PROMPTS, [7, 3] * 11]
    params = [
        SamplingParams(max_tokens=9, prompt_logprobs=index % 2 == 0, seed=1, n=2, ignore_eos=True)
        for index in range(len(prompts))
    ]
    for out, one in zip(llm.generate(prompts, params), params, strict=True):
        assert (out.prompt_logprobs is not None) == one.prompt_logprobs
        for sample in out.samples:
            ids = np.array(out.prompt_token_ids + sample.token_ids)
            scores = llm.score([ids])[0]
            np.testing.assert_allclose(sample.raw_logprobs, scores[len(out.prompt_token_ids) - 1 :], atol=1e-5)
        if out.prompt_logprobs is not None:
            found = np.array(out.prompt_logprobs[1:], np.float32)
            np.testing.assert_allclose(found, scores[: len(out.prompt_token_ids) - 1], atol=1e-5)


def test_18_only_blocks_that_were_handed_out_are_written(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model_folder, kv_cache_tokens=128, block_size=4, prefix_caching=False)
    parts = [part for index in range(2) for part in llm.engine.runner.pools.layer(index)]
    for part in parts:
        part.fill_(torch.nan)
    allocator = llm.engine.scheduler.allocator
    allocate, handed_out = allocator.allocate, set()

    def recorded(count: int) -> list[int]:
        blocks = allocate(count)
        handed_out.update(blocks)
        return blocks

    monkeypatch.setattr(allocator, "allocate", recorded)
    llm.generate(PROMPTS[:3], SamplingParams(n=2, max_tokens=6, ignore_eos=True))
    untouched = sorted(set(range(32)) - handed_out)
    assert 31 in untouched, "the last block is the one that a slot of -1 would hit"
    for part in parts:
        assert torch.isnan(part[untouched]).all() and not torch.isnan(part[sorted(handed_out)]).all()


def test_19_a_small_batch_after_a_large_one(model_folder: str) -> None:
    llm = LLM(model_folder)
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    expected = samples(LLM(model_folder), [PROMPT], params)
    for count in (32, 1, 7, 1):
        prompts = [PROMPT, *([index % 9] * (1 + index) for index in range(count - 1))]
        assert samples(llm, prompts, params)[:1] == expected


def test_22_an_update_amid_waiting_running_preempted_and_shared_requests(model_folder: str) -> None:
    llm = LLM(model_folder, max_num_seqs=4, kv_cache_tokens=48, block_size=4)
    params = SamplingParams(n=3, max_tokens=12, seed=2, ignore_eos=True)
    rids = [llm.add_request(prompt, params) for prompt in PROMPTS * 2]
    done = {}
    version = 0
    while llm.has_unfinished():
        done.update({out.request_id: out for out in llm.step()})
        version += 1
        llm.update_weights(weights(llm).items(), version=version, kv="recompute" if version % 5 == 0 else "keep")
    assert llm.stats()["preemptions"] > 0 and llm.stats()["kv_usage"] == 0
    expected = LLM(model_folder).generate(PROMPTS * 2, params)
    for rid, whole in zip(rids, expected, strict=True):
        for sample, one in zip(done[rid].samples, whole.samples, strict=True):
            assert sample.token_ids == one.token_ids, "equal weights: nothing shows but the versions"
            spans = sample.version_spans
            assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
            assert spans[-1][2] == 12 and [v for v, _, _ in spans] == sorted({v for v, _, _ in spans})
            assert len(spans) == 12


def test_28_the_checkpoint_gives_eos_ids_and_nothing_else(model_folder: str, copy_of: Callable[..., str]) -> None:
    params = SamplingParams(seed=6, max_tokens=20)
    sharp = {"temperature": 0.01, "top_k": 1, "top_p": 0.1, "repetition_penalty": 3.0, "do_sample": False}
    folder = copy_of(generation_config=sharp)
    assert samples(LLM(folder), PROMPTS, params) == samples(LLM(model_folder), PROMPTS, params)


def test_30_no_step_sees_half_an_update(model_folder: str) -> None:
    llm = LLM(model_folder)
    engine = llm.engine
    sequence = np.arange(20)
    updates, expected = [], []
    for seed in range(2):
        update = weights(llm, scale=0.3, seed=seed)
        cold = LLM(model_folder)
        cold.update_weights(update.items(), version=1)
        updates.append(stage_tensors(update.items(), engine.decoder.specs, device=engine.decoder.device))
        expected.append(cold.score([sequence])[0].tobytes())
    thread = EngineThread(engine, on_finished=lambda finished: None)
    thread.call(lambda: engine.commit(updates[0], 1))
    seen, stop = set(), threading.Event()

    def write() -> None:
        version = 2
        while not stop.is_set():
            thread.call(lambda v=version: engine.commit(updates[v % 2], v))  # type: ignore[misc]
            version += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            seen.add(thread.call(lambda: engine.score([sequence])[0].tobytes()))
    finally:
        stop.set()
        writer.join()
        thread.close()
    assert seen <= set(expected) and engine.clock.totals.updates > 20


def test_31_top_p_of_many_equal_tokens_keeps_its_share() -> None:
    from inference import explain_sampling

    found = explain_sampling(torch.zeros(40_000, dtype=torch.bfloat16).float(), SamplingParams(top_p=0.9))
    assert abs(int((found.probabilities > 0).sum()) - 36_000) <= 4


@pytest.mark.parametrize("tied", [False, True])
def test_35_the_head_is_the_updated_one(tied: bool, tmp_path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=22,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path))
    before = llm.score([np.arange(20)])[0]
    update = weights(llm)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    update[head] = update[head].flip(0)
    given = {**update, "lm_head.weight": update[head]}  # for a tied model it may be named too
    llm.update_weights(given.items(), version=1)
    model.load_state_dict(given, strict=False)
    with torch.no_grad():
        logprobs = model(torch.arange(20)[None]).logits[0].log_softmax(-1)
    expected = logprobs[torch.arange(19), torch.arange(1, 20)].numpy()
    np.testing.assert_allclose(llm.score([np.arange(20)])[0], expected, atol=1e-5)
    assert np.abs(before - expected).max() > 0.01
