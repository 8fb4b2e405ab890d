"""The packed policy says what transformers says of each document alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config

import learner.model
from learner.attention import DocumentLayout
from learner.loader import load_policy, wrap_layers
from learner.model import PolicyModel, attention_tokens, decoder_layers, forward_flops, layer_windows
from olmorl.contract.errors import ModelError
from tests.learner.conftest import SHAPE

CPU = torch.device("cpu")
LENGTHS = [17, 3, 40, 2, 16]


@pytest.mark.parametrize("family", ["olmo2", "llama_tied", "olmo3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_each_document_alone(
    model_folder: Callable[[str], str], family: str, checkpointing: bool
) -> None:
    folder = model_folder(family)
    policy = load_policy(folder, chunk_tokens=5)
    wrap_layers(policy, activation_checkpointing=checkpointing, compile=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    documents = [torch.randint(0, 23, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    layout = DocumentLayout.from_starts(np.concatenate([[0], np.cumsum(LENGTHS)]), device=CPU)

    scored_R = positions.nonzero()[:, 0]
    logprobs_R, entropy_R = policy(
        torch.cat(documents), positions, layout, scored_R=scored_R, context_R=scored_R - 1, temperature=0.8
    )
    expected = [(plain(d[None]).logits[0, :-1] / 0.8).log_softmax(-1) for d in documents]
    chosen = torch.cat([e.gather(-1, d[1:, None])[:, 0] for e, d in zip(expected, documents, strict=True)])
    torch.testing.assert_close(logprobs_R, chosen, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy_R, torch.cat([-(e.exp() * e).sum(-1) for e in expected]), rtol=1e-4, atol=2e-5)

    weights = torch.randn(len(chosen))
    (logprobs_R * weights).sum().backward()
    (chosen * weights).sum().backward()
    plain_grads = {name: p.grad for name, p in plain.named_parameters()}
    assert plain_grads.keys() == policy.hugging_face_parameters().keys()
    for name, parameter in policy.hugging_face_parameters().items():
        torch.testing.assert_close(parameter.grad, plain_grads[name], rtol=1e-3, atol=1e-4, msg=name)


def test_flops_count_products_and_attended_pairs(model_folder: Callable[[str], str]) -> None:
    policy = load_policy(model_folder("olmo3"))
    assert layer_windows(policy.config) == [7, None]
    positions = [*range(10), *range(4), *range(6, 9)]  # the last document is a child of six tokens' parent
    pairs_windowed = sum(min(i + 1, 7) for i in positions)
    pairs_full = sum(i + 1 for i in positions)
    embedding = head = 23 * 32
    body = sum(p.numel() for p in policy.parameters()) - embedding - head
    expected = 2 * body * 17 + 2 * head * 5 + 4 * 32 * (pairs_windowed + pairs_full)
    assert forward_flops(policy, ((0, 10), (0, 4), (6, 3)), num_scored=5) == expected


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [0],
        "head_dim": 8,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 3},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 1},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_flops_count_the_experts_that_a_token_is_sent_to(tmp_path: Path, family: str) -> None:
    """Against torch's own count of matrix products, where norms are left out; attention is in neither."""
    causal_lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **MIXTURES[family]))
    causal_lm.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    policy.causal_lm.set_experts_implementation("eager")  # torch does not count grouped products
    tokens, scored = torch.arange(17), torch.arange(1, 17)
    layout = DocumentLayout.from_starts(np.array([0, 17]), device=CPU)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        policy(tokens, tokens, layout, scored_R=scored, context_R=scored - 1, temperature=1.0)
    products = sum(count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    attention = 4 * 32 * 2 * 17 * 18 / 2  # heads of 8, two layers
    ours = forward_flops(policy, ((0, 17),), num_scored=16)
    assert ours - attention == pytest.approx(products, rel=0.03)


def test_a_mixture_that_does_not_say_how_many_experts_it_asks_counts_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    causal_lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SHAPE, **MIXTURES["mixtral"]))
    monkeypatch.setattr(learner.model, "EXPERTS_OF_A_TOKEN", ("another_name",))
    policy = PolicyModel(causal_lm)
    assert policy.num_body_parameters == policy.num_parameters - 2 * policy.num_head_parameters
    assert "count all of them" in caplog.text


def test_flops_are_those_of_the_experts_that_a_token_is_sent_to(tmp_path: object) -> None:
    """Two of four; the one that all tokens share is none of them."""
    policy = load_policy(other_model(str(tmp_path), "qwen2_moe"))
    experts = sum(p.numel() for layer in decoder_layers(policy) for p in layer.mlp.experts.parameters())
    assert experts == 2 * 4 * 3 * 32 * 16
    embedding = head = 23 * 32
    assert policy.num_body_parameters == policy.num_parameters - embedding - head - experts // 2


def test_attention_tokens_are_where_attention_costs_as_much_as_the_weights(model_folder: Callable[[str], str]) -> None:
    policy = load_policy(model_folder("olmo2"))
    length = round(attention_tokens(policy))
    whole = forward_flops(policy, ((0, length),), num_scored=length)
    weights = 2.0 * (policy.num_body_parameters + policy.num_head_parameters) * length
    assert whole == pytest.approx(2 * weights, rel=0.02)
    windowed = attention_tokens(load_policy(model_folder("olmo3")))
    assert windowed > 1.9 * length, "half its layers see a window"


def test_missing_and_unsupported_models_are_refused(tmp_path: object) -> None:
    with pytest.raises(ModelError, match="no/such/folder"):
        load_policy("no/such/folder")
    Gemma2Config(num_hidden_layers=1).save_pretrained(f"{tmp_path}/gemma2")
    quantized = AutoConfig.for_model("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    quantized.save_pretrained(f"{tmp_path}/gptq")
    with pytest.raises(ModelError, match="gptq is quantised, and only dense weights are trained"):
        load_policy(f"{tmp_path}/gptq")
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        load_policy(f"{tmp_path}/gemma2")


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.5},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "modernbert-decoder": {},
    "llama4_text": {"intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8},
    "mistral": {"sliding_window": 5},
    "starcoder2": {"sliding_window": 5, "residual_dropout": 0.5},
    "qwen2_moe": EXPERTS
    | {"num_experts": 4, "shared_expert_intermediate_size": 16, "use_sliding_window": True, "sliding_window": 5},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "head_dim": 8, "use_sliding_window": True, "sliding_window": 5},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
}


def other_model(folder: str, family: str) -> str:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **OTHERS[family]))
    model.save_pretrained(f"{folder}/{family}")
    return f"{folder}/{family}"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "family", ["gpt2", "opt", "seed_oss", "mistral", "starcoder2", "qwen2_moe", "qwen3_moe", "phimoe"]
)
def test_families_that_the_engine_has_not(tmp_path: object, family: str, checkpointing: bool) -> None:
    """Lists of layers by other names, learned positions, dropout that is no module, windows that only a mask tells of.

    With gradients, since layers are checkpointed for these alone.
    """
    folder = other_model(str(tmp_path), family)
    policy = load_policy(folder)
    wrap_layers(policy, activation_checkpointing=checkpointing, compile=False)
    assert len(decoder_layers(policy)) == 2
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.arange(3, 20)
    layout = DocumentLayout.from_starts(np.array([0, 8, 17]), device=CPU)
    positions = torch.cat([torch.arange(8), torch.arange(9)])
    scored = torch.arange(9, 17)
    ours, _ = policy(tokens, positions, layout, scored_R=scored, context_R=scored - 1, temperature=1.0)
    theirs = plain(tokens[None, 8:]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[9:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    for logprobs in (ours, theirs):
        (logprobs * torch.arange(8)).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            policy.hugging_face_parameters()[name].grad, parameter.grad, rtol=1e-4, atol=1e-4, msg=name
        )


@pytest.mark.parametrize(
    ("family", "windows"), [("mistral", [5, 5]), ("qwen2_moe", [5, None]), ("phimoe", [5, 5]), ("gpt2", [None, None])]
)
def test_windows_are_counted_as_they_are_attended(tmp_path: object, family: str, windows: list[int | None]) -> None:
    assert layer_windows(AutoConfig.from_pretrained(other_model(str(tmp_path), family))) == windows


@pytest.mark.parametrize(
    ("family", "complaint"),
    [
        ("lfm2", "carries a state over"),
        ("modernbert-decoder", "head of its own kind"),
        ("llama4_text", "cannot be trained on packed"),
    ],
)
def test_families_that_packing_would_change_are_refused(tmp_path: object, family: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        load_policy(other_model(str(tmp_path), family))
