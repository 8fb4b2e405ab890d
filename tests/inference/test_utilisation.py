"""Bytes and FLOPs of a step against figures worked out by hand from the published shapes of the models, and against
what this machine can read.

The parameter counts are those of the checkpoints; what follows is arithmetic on them, written out.
"""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference.llm import LLM
from inference.model.architecture import Architecture, Layer
from inference.model.decoder import Decoder
from inference.model.rope import Rope
from inference.stats import CostModel, StatsClock
from olmorl.contract.generation import SamplingParams

QWEN25_7B = 7_615_616_512  # parameters, embedding and head apart, as in the checkpoint
OLMO3_7B = 7_298_011_136
LLAMA_135M = 134_515_008  # SmolLM2, whose head is its embedding


def architecture(**shape: Any) -> Architecture:
    windows = shape.pop("windows")
    rope = Rope.__new__(Rope)  # plays no part in the costs
    return Architecture(
        layers=tuple(Layer(window, rope) for window in windows), norm_eps=1e-6, max_positions=65536, **shape
    )


def qwen() -> CostModel:
    arch = architecture(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_heads=28, num_kv_heads=4, head_dim=128,
        windows=[None] * 28, tied=False, qkv_bias=True,
    )  # fmt: skip
    return CostModel(arch, num_parameters=QWEN25_7B, element_size=2)


def olmo3() -> CostModel:
    arch = architecture(
        vocab_size=100278, hidden_size=4096, intermediate_size=11008, num_heads=32, num_kv_heads=32, head_dim=128,
        windows=[None if layer % 4 == 3 else 4096 for layer in range(32)], tied=False, norms="post", qk_norm="whole",
    )  # fmt: skip
    return CostModel(arch, num_parameters=OLMO3_7B, element_size=2)


def smollm() -> CostModel:
    arch = architecture(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
        windows=[None] * 30, tied=True,
    )  # fmt: skip
    return CostModel(arch, num_parameters=LLAMA_135M, element_size=4)


def step(*chunks: tuple[int, int]) -> Any:
    """A step that computes positions [start, end) of each sequence."""
    positions = [np.arange(start, end) for start, end in chunks]
    ends = np.cumsum([len(p) for p in positions])
    return SimpleNamespace(
        token_ids_T=np.zeros(ends[-1]), positions_T=np.concatenate(positions), chunk_ends_C=np.asarray(ends)
    )


def cost(model: CostModel, *chunks: tuple[int, int], rows: int) -> tuple[float, float]:
    """(FLOPs, bytes) of a step that makes so many rows of logits."""
    (flops, num_bytes), (head_flops, head_bytes) = model.body(step(*chunks)), model.head(rows)
    return flops + head_flops, num_bytes + head_bytes


def test_qwen25_7b_decodes_16_sequences_of_8000() -> None:
    flops, num_bytes = cost(qwen(), *[(7999, 8000)] * 16, rows=16)
    read_once = QWEN25_7B - 152064 * 3584  # of the embedding only the rows looked up
    assert read_once == 7_070_619_136
    kv = 2 * 28 * 4 * 128 * 2  # bytes a token: keys and values, layers, heads, head size, bfloat16
    assert kv == 57_344
    assert num_bytes == read_once * 2 + 16 * 3584 * 2 + 16 * 8000 * kv + 16 * kv
    assert num_bytes == pytest.approx(21.48e9, rel=1e-3)
    assert flops == 2 * read_once * 16 + 4 * 28 * 28 * 128 * 16 * 8000


QWEN_HEAD = 152064 * 3584
QWEN_BODY = QWEN25_7B - 2 * QWEN_HEAD


def test_qwen25_7b_prefills_2048() -> None:
    """The head is computed behind the last token alone; for every token it would be 8 % more."""
    flops, num_bytes = cost(qwen(), (0, 2048), rows=1)
    pairs = 2048 * 2049 // 2  # causal
    assert flops == 2 * QWEN_BODY * 2048 + 2 * QWEN_HEAD + 4 * 28 * 28 * 128 * pairs
    assert cost(qwen(), (0, 2048), rows=2048)[0] / flops == pytest.approx(1.081, abs=0.001)
    assert num_bytes == 7_070_619_136 * 2 + 2048 * 3584 * 2 + (2048 + 2048) * 57_344  # read once, and written


def test_the_middle_of_a_prompt_needs_no_head() -> None:
    flops, num_bytes = cost(qwen(), (0, 512), rows=0)
    assert flops == 2 * QWEN_BODY * 512 + 4 * 28 * 28 * 128 * 512 * 513 // 2
    assert num_bytes == QWEN_BODY * 2 + 512 * 3584 * 2 + (512 + 512) * 57_344


def test_a_chunk_reads_its_context_once_and_decoding_beside_it_its_own() -> None:
    flops, num_bytes = cost(qwen(), (1000, 1100), (4999, 5000), rows=2)
    assert num_bytes == 7_070_619_136 * 2 + 101 * 3584 * 2 + (1100 + 5000) * 57_344 + 101 * 57_344
    pairs = sum(range(1001, 1101)) + 5000
    assert flops == 2 * QWEN_BODY * 101 + 2 * QWEN_HEAD * 2 + 4 * 28 * 28 * 128 * pairs


def test_olmo3_7b_reads_no_further_than_its_windows() -> None:
    flops, num_bytes = cost(olmo3(), (19_999, 20_000), rows=1)
    read_once = OLMO3_7B - 100278 * 4096
    kv_a_layer = 2 * 32 * 128 * 2
    seen = 8 * 20_000 + 24 * 4096  # every fourth layer sees everything
    assert num_bytes == read_once * 2 + 4096 * 2 + kv_a_layer * (seen + 32)
    assert flops == 2 * read_once + 4 * 32 * 128 * seen
    assert cost(olmo3(), (99, 100), rows=1)[0] == 2 * read_once + 4 * 32 * 128 * 32 * 100, "shorter than the window"


def test_a_tied_head_is_read_as_the_head_it_is() -> None:
    flops, num_bytes = cost(smollm(), (99, 100), rows=1)
    assert num_bytes == LLAMA_135M * 4 + 576 * 4 + 2 * 30 * 3 * 64 * 4 * (100 + 1)
    assert flops == 2 * LLAMA_135M + 4 * 30 * 9 * 64 * 100


@pytest.mark.parametrize("prompt_logprobs", [False, True])
@pytest.mark.parametrize("chunk", [3, 64])
def test_an_engine_counts_the_logits_that_it_made(tmp_path: Path, chunk: int, prompt_logprobs: bool) -> None:
    """A prompt of 10, in chunks or whole, and three samples of two tokens: the head is computed once a token drawn."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    llm = LLM(tmp_path, max_num_seqs=8, kv_cache_tokens=256, max_tokens_per_step=chunk, overlap=False)
    params = SamplingParams(n=3, max_tokens=2, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    llm.generate([list(range(1, 11))], params)
    stats, head = llm.stats(), 96 * 32
    rows = 3 * 2 + (9 if prompt_logprobs else 0)
    assert stats["logit_rows"] == rows and stats["tokens_computed"] == 10 + 3
    body = llm.engine.decoder.num_parameters - 2 * head
    pairs = 10 * 11 // 2 + 3 * 11
    assert stats["flops"] == 2 * body * 13 + 2 * head * rows + 4 * 2 * 4 * 8 * pairs
    if chunk == 64:
        moved = 13 * 32 * 4 + 2 * 2 * 2 * 8 * 4 * ((10 + 3 * 11) + 13)
        assert stats["bytes"] == 2 * 4 * (body + head) + moved, "two steps, each of which reads all weights once"


def test_samples_that_share_a_prompt_prefill_it_once() -> None:
    """The prompt's chunk is there once; each sample's own tokens read the whole context, as attention does."""
    alone = cost(qwen(), (0, 500), rows=1)[0]
    shared = cost(qwen(), (0, 500), *[(500, 501)] * 7, rows=8)[0] - alone
    assert shared == 7 * (2 * 7_070_619_136 + 4 * 28 * 28 * 128 * 501)


@pytest.mark.parametrize(
    ("quantization", "of_576", "of_1536"),
    [
        ("int8", 576 + 8 + 8, 1536 + 8 + 8),  # a float32 scale, an int32; up to a multiple of 16 bytes
        ("int4", 18 * (16 + 4) + 8, 48 * (16 + 4)),  # for 32 weights two bfloat16
    ],
)
def test_quantised_rows_are_read_as_bytes_and_a_float_head_as_floats(
    quantization: Any, of_576: int, of_1536: int
) -> None:
    """SmolLM2; norms and the tied head stay float32."""
    rope = Rope(1e4)
    arch = Architecture(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
        layers=(Layer(None, rope),) * 30, tied=True, norm_eps=1e-5, max_positions=64,
    )  # fmt: skip

    def decoder(**options: Any) -> Decoder:
        device = torch.device("cpu")
        return Decoder(arch, dtype=torch.float32, device=device, max_model_len=64, quantization=quantization, **options)

    rows = (960 + 576) * of_576 + 3072 * of_576 + 576 * of_1536  # qkv and out; gate and up; down
    floats = (2 * 30 + 1) * 576 * 4  # norms
    head = 49152 * 576
    assert decoder().streamed_bytes == 30 * rows + floats + 4 * head
    assert decoder(quantize_head=True).streamed_bytes == 30 * rows + floats + 49152 * of_576
    assert decoder(quantize_head=True).num_parameters == LLAMA_135M, "a copy of the embedding adds none"
    costs = CostModel(
        arch,
        num_parameters=LLAMA_135M,
        element_size=4,
        weight_bytes=decoder().streamed_bytes,
        head_bytes=decoder().head.nbytes,
    )
    flops, num_bytes = cost(costs, (99, 100), rows=1)
    assert num_bytes == 30 * rows + floats + 4 * head + 576 * 4 + 2 * 30 * 3 * 64 * 4 * (100 + 1)
    assert flops == 2 * LLAMA_135M + 4 * 30 * 9 * 64 * 100


@pytest.mark.parametrize(  # who shares the machine lowers it
    "floor", [0.1, pytest.param(0.6, marks=[pytest.mark.soak, pytest.mark.timed])]
)
def test_a_step_that_only_reads_comes_near_the_bandwidth_and_not_above_it(tmp_path: Path, floor: float) -> None:
    """One sequence and 270 MB of weights, far beyond the caches: bytes by the cost model over the fastest step, against
    the streaming read. Peak and steps are measured in turn, and again until one step was fast enough."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=2048, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=16,
        max_position_embeddings=256, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    llm = LLM(tmp_path, max_num_seqs=1, kv_cache_tokens=256)
    peak = rate = 0.0
    for turn in range(20):
        if turn >= 3 and floor < rate / peak < 1.0:
            break
        peak = max(peak, llm.device_peak().bandwidth)
        llm.add_request([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
        llm.step()  # the prompt
        while llm.has_unfinished():
            before, started = llm.stats()["bytes"], time.perf_counter()
            llm.step()
            rate = max(rate, (llm.stats()["bytes"] - before) / (time.perf_counter() - started))
    assert llm.stats()["bytes"] / llm.stats()["steps"] > 200e6
    assert floor < rate / peak < 1.0, f"{rate / 1e9:.1f} of {peak / 1e9:.1f} GB/s"


def test_a_snapshot_never_lies_in_the_middle_of_a_step() -> None:
    """Else a step's seconds were counted as waiting first and as busy later, and the names would not add up."""
    clock = StatsClock()
    clock.begin_step()
    time.sleep(0.03)
    during = clock.snapshot()
    clock.totals.prefill_steps += 1
    clock.end_step()
    after = clock.snapshot()
    assert during["busy_seconds"] == 0 and during["wall_seconds"] < 0.03
    assert 0.03 <= after["busy_seconds"] == after["prefill_seconds"] <= after["wall_seconds"]
    assert after["wall_seconds"] - after["busy_seconds"] == pytest.approx(during["wall_seconds"], abs=0.02)


def test_a_snapshot_from_another_thread_tells_of_whole_steps() -> None:
    """As `/metrics` and the driver read them. A step here is three tokens, six FLOPs and one drawn token."""
    clock = StatsClock()
    over = threading.Event()

    def steps() -> None:
        while not over.is_set():
            clock.begin_step()
            clock.totals.steps += 1
            clock.totals.tokens_computed += 3
            clock.totals.flops += 6.0
            time.sleep(0)  # the other thread's turn
            clock.totals.output_tokens += 1
            clock.end_step()

    worker = threading.Thread(target=steps)
    worker.start()
    try:
        before = clock.snapshot()
        while before["steps"] < 300:
            now = clock.snapshot()
            assert now["tokens_computed"] == 3 * now["steps"] == 3 * now["output_tokens"] == now["flops"] / 2
            assert now["steps"] >= before["steps"] and now["wall_seconds"] >= before["wall_seconds"]
            before = now
    finally:
        over.set()
        worker.join()
