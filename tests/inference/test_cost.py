"""What a step costs besides the model: the same few calls a running request, whatever their number and length.

How many microseconds those are hangs on the processor: soak tests hold them to 10, on a quiet machine. Times are the
best of many steps: other load can only make a step slower.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from inference import LLM, SamplingParams
from inference.sampler import SamplingTable
from inference.step_batch import BlockTable

MakePolicy = Callable[..., Any]
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def full_steps(make_policy: MakePolicy, running: int) -> Iterator[Callable[[], None]]:
    """Steps that a scheduler with so many requests takes, besides the model: those in which all of them run."""
    policy = make_policy(
        running * 16, block_size=16, max_num_seqs=running, max_tokens_per_step=2048, prefix_caching=True
    )
    for number in range(running // 8):
        policy.add([(7 * number + index) % 50 for index in range(100)], n=8, max_tokens=100)
    table, sampling = BlockTable(running, block_size=16), SamplingTable(running)

    def step() -> None:
        plan = policy.scheduler.schedule()
        table.update(entered=plan.entered, grown=plan.grown)
        for sequence in plan.entered:
            sampling.set(sequence)
        table.batch(plan.chunks)
        sampling.batch([sequence for sequence, _ in plan.chunks])
        policy.advance(plan)

    while len(policy.scheduler.running) < running:
        step()
    step()  # the last that came in
    for _ in range(60):
        assert len(policy.scheduler.running) == running
        yield step


def calls(do: Callable[[], None]) -> int:
    """Of Python's functions and of what is written in C."""
    count = 0

    def on(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count


def test_scheduling_and_batch_building_take_the_same_few_calls_for_each_request(make_policy: MakePolicy) -> None:
    few, some, many = (statistics.mean(map(calls, full_steps(make_policy, n))) / n for n in (16, 256, 1024))
    assert few < 45  # 36, and what a step makes whatever their number
    assert many <= some <= few


@pytest.mark.soak
@pytest.mark.timed
@pytest.mark.parametrize("running", [16, 256, 1024])
def test_the_time_of_scheduling_and_batch_building(make_policy: MakePolicy, running: int) -> None:
    seconds = []
    for step in full_steps(make_policy, running):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    assert min(seconds) / running < 10e-6


def folder_of(config: PreTrainedConfig, folder: Path) -> str:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return str(folder)


def decode_seconds(llm: LLM, length: int, steps: int = 60) -> float:
    """Of one step at that length."""
    llm.add_request([1] * length, SamplingParams(max_tokens=steps, ignore_eos=True))
    seconds = []
    while llm.has_unfinished():
        started = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - started)
    return min(seconds[-steps + 5 :])


def test_a_step_at_32768_tokens_costs_what_it_costs_at_100_but_for_attention(tmp_path: Path) -> None:
    config = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=32, max_window_layers=0)
    llm = LLM(folder_of(config, tmp_path), kv_cache_tokens=32768, max_num_seqs=4, prefix_caching=False)
    early, late = decode_seconds(llm, 100), decode_seconds(llm, 32768 - 60)
    assert late < 1.5 * early


@pytest.mark.soak
def test_a_request_of_32768_tokens(tmp_path: Path) -> None:
    llm = LLM(folder_of(LlamaConfig(**SMALL), tmp_path), kv_cache_tokens=32768, max_num_seqs=4)
    out = llm.generate([[1] * 32738], SamplingParams(max_tokens=99, ignore_eos=True))[0]
    assert out.finish_reason == "length" and len(out.samples[0].token_ids) == 30
    assert llm.stats()["steps"] == -(-32738 // 2048) + 29
