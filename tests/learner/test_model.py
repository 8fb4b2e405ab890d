"""The packed policy says what transformers says of each document alone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from learner.attention import DocumentLayout
from learner.model import attention_tokens, forward_flops, layer_windows, load_policy
from olmorl.contract.errors import ModelError

CPU = torch.device("cpu")
LENGTHS = [17, 3, 40, 2, 16]


@pytest.mark.parametrize("family", ["olmo2", "llama_tied", "olmo3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_each_document_alone(
    model_folder: Callable[[str], str], family: str, checkpointing: bool
) -> None:
    folder = model_folder(family)
    policy = load_policy(folder, chunk_tokens=5, activation_checkpointing=checkpointing)
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
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        load_policy(f"{tmp_path}/gemma2")
