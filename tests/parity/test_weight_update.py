"""Updates with the KV cache kept, recomputed, and refused, against transformers continuing its own cache."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from inference import LLM, SamplingParams
from olmorl.contract.errors import WeightUpdateError

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
Family = Callable[[str], tuple[Path, PreTrainedModel]]
PROMPTS = [list(range(length, 2 * length)) for length in (5, 17, 32)]  # of no common block: all begin in one step
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BEFORE = 9  # tokens drawn under the first weights


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: a tied head is the embedding and has no name of its own."""
    tied = model.config.tie_word_embeddings
    return {name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def perturbed(model: PreTrainedModel, scale: float = 0.1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {name: t + scale * torch.randn(t.shape, generator=generator) for name, t in weights(model).items()}


@torch.no_grad()
def continued(
    model: PreTrainedModel, second: dict[str, torch.Tensor], prompt: list[int], *, keep: bool = True
) -> list[int]:
    """BEFORE tokens under the model's weights, the rest under `second`, with the cache kept or made anew."""
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cache, ids, out = DynamicCache(config=model.config), prompt, []
    for index in range(GREEDY.max_tokens):
        if index == BEFORE:
            model.load_state_dict(second, strict=False)
            if not keep:
                cache, ids = DynamicCache(config=model.config), prompt + out
        out.append(int(model(torch.tensor([ids]), past_key_values=cache).logits[0, -1].argmax()))
        ids = out[-1:]
    model.load_state_dict(first)
    return out


def run_with_update(llm: LLM, second: dict[str, torch.Tensor], **options: str) -> list[tuple[list[int], list]]:
    rids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(BEFORE):
        assert not llm.step()
    llm.update_weights(second.items(), version=1, **options)
    done = {}
    while llm.has_unfinished():
        done.update({out.request_id: out.samples[0] for out in llm.step()})
    return [(done[rid].token_ids, done[rid].version_spans) for rid in rids]


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "olmo3"])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_update_amid_decoding(family_model: Family, name: str, kv: str) -> None:
    folder, model = family_model(name)
    second = perturbed(model)
    results = run_with_update(LLM(str(folder), block_size=4), second, kv=kv)
    differs = 0
    for prompt, (tokens, spans) in zip(PROMPTS, results, strict=True):
        assert tokens == continued(model, second, prompt, keep=kv == "keep")
        assert spans == [(0, 0, BEFORE), (1, BEFORE, GREEDY.max_tokens)]
        differs += tokens != continued(model, second, prompt, keep=kv != "keep")
    assert differs, "keeping and recomputing give the same tokens here: the test could not tell them apart"


def test_new_request_after_update_equals_a_cold_engine(family_model: Family) -> None:
    folder, model = family_model("llama")
    second = perturbed(model)
    warm = LLM(str(folder), block_size=4)
    stale = [out.samples[0].token_ids for out in warm.generate(PROMPTS, GREEDY)]
    for prompt in PROMPTS:  # and blocks that straddle the update
        warm.add_request(prompt, GREEDY)
    for _ in range(BEFORE):
        warm.step()
    warm.update_weights(second.items(), version=1)
    late = [warm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    done = {}
    while warm.has_unfinished():
        done.update({out.request_id: out.samples[0].token_ids for out in warm.step()})
    again = [out.samples[0].token_ids for out in warm.generate(PROMPTS, GREEDY)]
    cold = LLM(str(folder), prefix_caching=False)
    cold.update_weights(second.items(), version=1)
    expected = [out.samples[0].token_ids for out in cold.generate(PROMPTS, GREEDY)]
    assert [done[rid] for rid in late] == expected == again
    assert expected != stale


def test_preempted_after_update_never_finds_its_older_blocks(family_model: Family) -> None:
    folder, model = family_model("llama")
    second = perturbed(model)
    llm = LLM(str(folder), block_size=4, kv_cache_tokens=72)
    results = run_with_update(llm, second)
    assert llm.stats()["preemptions"] > 0
    allowed = [{tuple(continued(model, second, prompt, keep=keep)) for keep in (True, False)} for prompt in PROMPTS]
    # The newest was preempted some time after the update, so it lies between the two: kept, then recomputed.
    assert tuple(results[0][0]) in allowed[0]


def test_equal_weights_are_a_bitwise_no_op_and_there_and_back_again(family_model: Family) -> None:
    folder, model = family_model("olmo2")
    llm = LLM(str(folder))
    checksum = llm.weights_checksum()
    addresses = {name: tensor.data_ptr() for name, tensor in llm.engine.decoder.tensors.items()}
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    first = [out.samples[0].logprobs for out in llm.generate(PROMPTS, params)]
    llm.update_weights(weights(model).items(), version=1)
    assert llm.weights_checksum() == checksum
    assert [out.samples[0].logprobs for out in llm.generate(PROMPTS, params)] == first
    llm.update_weights(perturbed(model).items(), version=2)
    assert llm.weights_checksum() != checksum
    llm.update_weights(weights(model).items(), version=3)
    assert llm.weights_checksum() == checksum == LLM(str(folder), block_size=4).weights_checksum()
    assert [out.samples[0].logprobs for out in llm.generate(PROMPTS, params)] == first
    assert {name: tensor.data_ptr() for name, tensor in llm.engine.decoder.tensors.items()} == addresses


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "nan", "twice", "version", "tied"])
def test_a_bad_update_is_refused_whole(family_model: Family, fault: str) -> None:
    folder, model = family_model("qwen3" if fault == "tied" else "llama")
    llm = LLM(str(folder))
    checksum = llm.weights_checksum()
    rid = llm.add_request(PROMPTS[0], GREEDY)
    llm.step()
    update = list(perturbed(model).items())
    name, tensor = update[-1]
    if fault == "missing":
        update = update[:-1]
    elif fault == "extra":
        update.append(("model.other.weight", tensor))
    elif fault == "shape":
        update[-1] = (name, tensor[:-1])
    elif fault == "nan":
        bad = tensor.clone()
        bad.view(-1)[-1] = float("nan")
        update[-1] = (name, bad)
    elif fault == "twice":
        update.append(update[0])
    elif fault == "tied":
        update.append(("lm_head.weight", dict(update)["model.embed_tokens.weight"] + 1))
    with pytest.raises(WeightUpdateError, match="nothing was changed"):
        llm.update_weights(update, version=0 if fault == "version" else 1)
    assert llm.weights_checksum() == checksum
    outs = {}
    while llm.has_unfinished():
        outs.update({out.request_id: out for out in llm.step()})
    expected = LLM(str(folder)).generate([PROMPTS[0]], GREEDY)[0].samples[0]
    assert outs[rid].samples[0].token_ids == expected.token_ids
    assert outs[rid].samples[0].version_spans == [(0, 0, GREEDY.max_tokens)]


def test_samples_that_had_not_begun_start_from_the_new_weights(family_model: Family) -> None:
    folder, model = family_model("llama")
    second = perturbed(model)
    llm = LLM(str(folder), max_num_seqs=2, block_size=4)
    prompt = PROMPTS[1]
    llm.add_request(prompt, SamplingParams(n=5, temperature=0, max_tokens=24, ignore_eos=True))
    for _ in range(BEFORE):
        llm.step()
    llm.update_weights(second.items(), version=1)
    outs = []
    while llm.has_unfinished():
        outs += llm.step()
    cold = LLM(str(folder))
    cold.update_weights(second.items(), version=1)
    expected = cold.generate([prompt], GREEDY)[0].samples[0].token_ids
    samples = outs[0].samples
    assert [sample.token_ids for sample in samples[2:]] == [expected] * 3
    assert all(sample.version_spans == [(1, 0, 24)] for sample in samples[2:])
    assert np.array_equal(samples[0].token_ids, samples[1].token_ids)
