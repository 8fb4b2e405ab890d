"""Each sentence of what is settled about `LLM`, and what it says to users who get something wrong."""

import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from inference import LLM, SamplingParams
from olmorl.contract.errors import ConfigError, WeightUpdateError

PROMPT = [1, 10, 2, 11]
LONG = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)


def run_out(llm: LLM) -> dict:  # type: ignore[type-arg]
    done = {}
    while llm.has_unfinished():
        done.update({out.request_id: out for out in llm.step()})
    return done


def weights(llm: LLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in llm.engine.decoder.tensors.items()}


# Calls


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("1+2=", None, "single string"),
        ([PROMPT, PROMPT], [SamplingParams()], "2 prompts but 1 sampling parameters"),
        ([PROMPT], [{"max_tokens": 3}], "params holds {'max_tokens': 3}; give SamplingParams"),
        ([PROMPT, [1.5]], None, r"prompt 1: a prompt is text or a list of integer token ids, not \[1.5\]"),
        ([PROMPT, [[1], [2]]], None, "prompt 1: a prompt is text or a list"),
        ([PROMPT, []], None, "prompt 1: the prompt is empty"),
        ([PROMPT, ""], None, "prompt 1: the prompt is empty"),
        ([PROMPT, "\ud800"], None, "prompt 1: .*surrogates not allowed"),
        ([PROMPT, [-1]], None, "prompt 1: token id -1 is outside the vocabulary"),
        (
            [PROMPT, PROMPT],
            SamplingParams(stop_token_ids=(99,)),
            "prompt 0: stop_token_ids holds 99, outside the vocab",
        ),
        ([PROMPT, [22]], None, r"prompt 1: token id 22 is outside the vocabulary \[0, 22\)"),
        ([PROMPT, [1] * 128], None, "prompt 1: the prompt has 128 tokens; it must be shorter than max_model_len = 128"),
        ([PROMPT, [1] * 100], None, "prompt 1: the prompt has 100 tokens; the KV pool holds 64"),
    ],
)
def test_generate_refuses_the_whole_call_before_anything_starts(model_folder, prompts, params, message) -> None:  # type: ignore[no-untyped-def]
    llm = LLM(model_folder, kv_cache_tokens=64)
    rid = llm.add_request(PROMPT, LONG)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert list(llm.engine.requests) == [rid] and llm.engine.num_arrived == 1
    assert run_out(llm)[rid].samples[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([1], r"2 to max_model_len = 128 integer token ids; one is of shape \(1,\)"),
        ([1] * 129, "max_model_len = 128"),
        ([[1, 2], [3, 4]], "shape"),
        ([1.5, 2.5], "float64"),
        ([1, -5, 2], "token id -5 is outside the vocabulary"),
        ([1, 10**9, 2], "token id 1000000000 is outside the vocabulary"),
    ],
)
def test_what_cannot_be_scored_is_refused(model_folder: str, sequence: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(model_folder).score([np.array(PROMPT), np.array(sequence)])


def test_no_prompts_no_outputs(model_folder: str) -> None:
    assert LLM(model_folder).generate([]) == []


def test_prompts_may_be_text_lists_or_arrays(model_folder: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    outs = LLM(model_folder).generate(["1+2=", PROMPT, np.array(PROMPT, np.int32), tuple(PROMPT)], params)
    assert len({tuple(out.samples[0].token_ids) for out in outs}) == 1
    assert all(out.prompt_token_ids == PROMPT for out in outs)


def test_requests_of_others_are_not_lost_in_generate(model_folder: str) -> None:
    llm = LLM(model_folder)
    rid = llm.add_request(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    llm.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
    assert [out.request_id for out in llm.step()] == [rid] and not llm.has_unfinished()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "LLM has no option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"kv_cache_token": 4}, "did you mean 'kv_cache_tokens'?"),
        ({"swap_space": 4}, "options are dtype, device, max_num_seqs"),
        ({"max_num_seqs": "8"}, "max_num_seqs is '8'; it must be an integer >= 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be an integer >= 1"),
        ({"threads": 0}, "threads is 0; it must be an integer >= 1"),
        ({"seed": "1"}, "seed is '1'; it must be an integer"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_model_len": 1}, "max_model_len is 1; it must be an integer >= 2"),
        ({"batching": "dynamic"}, "batching is 'dynamic'; it must be 'continuous' or 'static'"),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be one of float32, bfloat16, float16"),
        ({"device": "gpu"}, "device is 'gpu'; it must be 'cpu' or 'cuda'"),
        ({"device": "cuda:1"}, "of several GPUs, CUDA_VISIBLE_DEVICES says which"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"quantization": "fp4"}, "quantization is 'fp4'"),
    ],
)
def test_options_that_are_wrong_are_named(model_folder: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(model_folder, **options)
    assert message in str(error.value) and isinstance(error.value, ValueError)


def test_auto_is_float32_on_a_cpu(model_folder: str) -> None:
    assert LLM(model_folder, dtype="auto").engine.config.dtype == "float32"


def test_a_length_the_model_was_not_made_for_is_said(
    copy_of: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    for scaling, length in ((None, 128), (yarn, 512)):
        folder = copy_of(config={"rope_parameters": scaling})
        LLM(folder, max_model_len=length)
        assert not caplog.records
        LLM(folder, max_model_len=length + 1)
        assert f"made for {length} positions" in caplog.text
        caplog.clear()


# Requests


def test_an_aborted_request_comes_out_of_the_next_step_and_abort_says_whether_it_did_anything(
    model_folder: str,
) -> None:
    llm = LLM(model_folder)
    other = llm.add_request(PROMPT, LONG)
    rid = llm.add_request(PROMPT, SamplingParams(n=2, max_tokens=50, seed=3, ignore_eos=True))
    for _ in range(4):
        assert llm.step() == []
    assert llm.abort(rid) is True and llm.abort(rid) is False and llm.abort("unknown") is False
    (out,) = llm.step()
    assert out.request_id == rid and out.finish_reason == "abort" and out.error is None
    full = LLM(model_folder).generate([PROMPT], SamplingParams(n=2, max_tokens=50, seed=3, ignore_eos=True))[0]
    for sample, whole in zip(out.samples, full.samples, strict=True):
        assert sample.token_ids == whole.token_ids[:4] and sample.finish_reason == "abort"
        assert len(sample.logprobs) == len(sample.raw_logprobs) == 4 and sample.version_spans == [(0, 0, 4)]
    assert run_out(llm)[other].finish_reason == "length" and llm.abort(other) is False


def test_length_is_exactly_max_model_len(model_folder: str) -> None:
    llm = LLM(model_folder, max_model_len=20)
    for count in (15, 16, 17, 100):
        sample = llm.generate([PROMPT], SamplingParams(max_tokens=count, ignore_eos=True))[0].samples[0]
        assert len(sample.token_ids) == min(count, 16) and sample.finish_reason == "length"
    longest = llm.generate([[1] * 19], SamplingParams(max_tokens=9, ignore_eos=True))[0].samples[0]
    assert len(longest.token_ids) == 1 and longest.finish_reason == "length"


def test_kv_cache_tokens_is_what_requests_can_use(model_folder: str) -> None:
    llm = LLM(model_folder, kv_cache_tokens=64, block_size=16)
    fits = SamplingParams(max_tokens=61, ignore_eos=True)  # the last token drawn needs no KV
    out = llm.generate([PROMPT], fits)[0]
    assert out.finish_reason == "length" and len(out.samples[0].token_ids) == 61 and llm.stats()["preemptions"] == 0
    assert len(llm.generate([[1] * 64], SamplingParams(max_tokens=1))[0].samples[0].token_ids) == 1
    out = llm.generate([PROMPT], SamplingParams(max_tokens=62, ignore_eos=True))[0]
    assert out.finish_reason == "abort"
    assert out.error == "65 tokens outgrew the KV pool alone; raise kv_cache_tokens or lower max_tokens"
    assert len(out.samples[0].token_ids) == 61, "what it had is handed out"


def test_a_recompute_that_needs_one_block_more_than_there_are_ends_that_request_alone(model_folder: str) -> None:
    llm = LLM(model_folder, kv_cache_tokens=32, block_size=4)
    rid = llm.add_request([1, 2, 3], SamplingParams(max_tokens=90, ignore_eos=True))
    while llm.engine.scheduler.running == [] or llm.engine.scheduler.running[0].num_tokens < 33:
        llm.step()
    other = llm.add_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    llm.update_weights(weights(llm).items(), version=1, kv="recompute")
    done = run_out(llm)
    assert done[rid].finish_reason == "abort" and "outgrew" in str(done[rid].error)
    assert len(done[rid].samples[0].token_ids) == 30 and done[other].finish_reason == "length"
    assert llm.stats()["kv_usage"] == 0


def test_a_state_dict_is_an_update(model_folder: str) -> None:
    llm, model = LLM(model_folder), AutoModelForCausalLM.from_pretrained(model_folder)
    before = llm.weights_checksum()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    llm.update_weights(model.state_dict(), version=1)
    after = llm.weights_checksum()
    assert after != before
    llm.update_weights(model.state_dict().items(), version=2)
    assert llm.weights_checksum() == after


def test_top_and_prompt_logprobs(model_folder: str) -> None:
    llm = LLM(model_folder)
    params = SamplingParams(max_tokens=3, logprobs=4, prompt_logprobs=True, ignore_eos=True, temperature=0.7, seed=0)
    out = llm.generate([PROMPT], params)[0]
    for token, logprob, top in zip(
        out.samples[0].token_ids, out.samples[0].logprobs, out.samples[0].top_logprobs, strict=True
    ):
        assert len(top) == 4 and [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(PROMPT)
    np.testing.assert_allclose(out.prompt_logprobs[1:], llm.score([np.array(PROMPT)])[0], atol=1e-6)
    plain = llm.generate([PROMPT], SamplingParams(max_tokens=1))[0]
    assert plain.prompt_logprobs is None and plain.samples[0].top_logprobs == []


# Weights


def test_versions_begin_at_0_and_must_rise(model_folder: str) -> None:
    llm = LLM(model_folder)
    assert llm.stats()["version"] == 0
    for version, ok in ((0, False), (3, True), (3, False), (2, False), (3.5, False), (math.nan, False), (4, True)):
        if ok:
            llm.update_weights(weights(llm).items(), version=version)
        else:
            with pytest.raises(WeightUpdateError, match=f"version {version} does not follow"):
                llm.update_weights(weights(llm).items(), version=version)
    assert llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))[0].samples[0].version_spans == [
        (4, 0, 2)
    ]


@pytest.mark.parametrize("spoil", [torch.Tensor.to_sparse, lambda t: t.to(torch.complex64), np.asarray])
def test_a_tensor_that_cannot_be_copied_is_refused_before_any_is(model_folder: str, spoil) -> None:  # type: ignore[no-untyped-def]
    llm = LLM(model_folder)
    changed = {name: tensor + 1 for name, tensor in weights(llm).items()}
    checksum, last = llm.weights_checksum(), "lm_head.weight"
    changed[last] = spoil(changed[last])
    with pytest.raises(WeightUpdateError, match="nothing was changed"):
        llm.update_weights(changed.items(), version=1)
    assert llm.weights_checksum() == checksum and llm.stats()["version"] == 0


def test_tensors_are_copied_and_cast(model_folder: str) -> None:
    llm = LLM(model_folder)
    checksum = llm.weights_checksum()
    wide = {name: tensor.double() for name, tensor in weights(llm).items()}
    llm.update_weights(wide.items(), version=1)
    assert llm.weights_checksum() == checksum == LLM(model_folder, prefix_caching=False).weights_checksum()
    for tensor in wide.values():
        tensor.fill_(0)
    assert llm.weights_checksum() == checksum
    narrow = {name: tensor.bfloat16() for name, tensor in weights(llm).items()}
    llm.update_weights(narrow.items(), version=2)
    for name, tensor in llm.engine.decoder.tensors.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, narrow[name].float())
    with pytest.raises(ValueError, match="kv is 'drop'; it must be 'keep' or 'recompute'"):
        llm.update_weights(narrow.items(), version=3, kv="drop")  # type: ignore[arg-type]


def test_an_update_amid_a_prompt_is_applied_at_once(model_folder: str) -> None:
    llm = LLM(model_folder, max_tokens_per_step=8)
    rid = llm.add_request([1, 2, 3, 4] * 5, SamplingParams(max_tokens=3, ignore_eos=True))
    llm.step()
    llm.update_weights(weights(llm).items(), version=5)
    sample = run_out(llm)[rid].samples[0]
    assert sample.version_spans == [(5, 0, 3)] and sample.kv_events == [(0, 0, "prefill"), (8, 5, "swap")]


def test_stats_have_what_the_benchmark_reports(model_folder: str) -> None:
    llm = LLM(model_folder)
    llm.generate([PROMPT, PROMPT[:2]], SamplingParams(n=2, max_tokens=6, ignore_eos=True))
    stats = llm.stats()
    assert all(isinstance(value, float | int) for value in stats.values())
    assert stats["output_tokens"] == 24 and stats["steps"] == 6 and stats["mean_live_batch"] == 4
    assert stats["prefill_tokens_computed"] == stats["prefill_tokens_shared"] == 6
    assert stats["slot_waste"] == 0 and stats["preemptions"] == 0 and stats["tokens_per_second"] > 0


# Static batching


@pytest.mark.parametrize("lengths", [(3, 9, 12, 5), (7, 7, 7, 7), (1, 40, 2)])
def test_static_slot_waste_is_one_minus_mean_over_max(model_folder: str, lengths: tuple[int, ...]) -> None:
    llm = LLM(model_folder, max_num_seqs=4, batching="static")
    prompts = [[token, 10, 11] for token in range(len(lengths))]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    llm.generate(prompts, params)
    assert llm.stats()["slot_waste"] == pytest.approx(1 - np.mean(lengths) / max(lengths))
    assert llm.stats()["steps"] == max(lengths)


def test_static_batches_follow_one_another_and_draw_what_continuous_ones_draw(model_folder: str) -> None:
    lengths = [3, 17, 8, 25, 2, 30, 11, 4]
    prompts = [[token, 10, 11] for token in range(8)]
    params = [SamplingParams(max_tokens=length, n=2, seed=3, ignore_eos=True) for length in lengths]
    outs, stats = {}, {}
    for batching in ("static", "continuous"):
        llm = LLM(model_folder, max_num_seqs=4, batching=batching)
        outs[batching] = [[s.token_ids for s in out.samples] for out in llm.generate(prompts, params)]
        stats[batching] = llm.stats()
    assert outs["static"] == outs["continuous"]
    batches = [lengths[index : index + 2] for index in range(0, 8, 2)]  # two prompts of two samples each
    assert stats["static"]["steps"] == sum(max(batch) for batch in batches)
    assert stats["static"]["slot_waste"] == pytest.approx(1 - 2 * sum(lengths) / (4 * stats["static"]["steps"]))
    assert stats["continuous"]["slot_waste"] < 0.5 * stats["static"]["slot_waste"]


# Alone in a process


def test_the_engine_needs_neither_ray_nor_pydantic_nor_transformers(model_folder: str) -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "pydantic", "transformers", "typer", "wandb"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
torch.set_num_threads(1)
from inference import LLM, SamplingParams
llm = LLM({model_folder!r})
out = llm.generate([[1, 10, 2, 11]], SamplingParams(max_tokens=5, ignore_eos=True))[0]
llm.update_weights([(n, t.clone()) for n, t in llm.engine.decoder.tensors.items()], version=1)
assert len(out.samples[0].token_ids) == 5
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_engines_fit_in_one_process(model_folder: str) -> None:
    first, second = LLM(model_folder), LLM(model_folder)
    expected = first.generate([PROMPT], LONG)[0].samples[0].token_ids
    second.update_weights([(name, tensor * 2) for name, tensor in weights(second).items()], version=1)
    second.generate([PROMPT], LONG)
    assert first.generate([PROMPT], LONG)[0].samples[0].token_ids == expected
