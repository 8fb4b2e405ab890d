"""A step launched before the tokens of the last one are read must change nothing that a caller can see.

On a CPU the delay is emulated by the engine itself: the ids drawn stay in a tensor, the next step takes its input from
there, and the host reads them one step late. Everything is float32 on compiled kernels, hence bitwise comparable.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference import LLM, SamplingParams
from inference.llm import RequestOutput

PROMPTS = [[1, 10, 2, 11], [3, 10, 4, 10, 5, 11], [9] * 17, [0], [3, 10, 4, 10, 5, 11, 2, 2, 7]]
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 2.5, "temperature": 0, "ignore_eos": True},
    {"frequency_penalty": 1.5, "min_tokens": 9, "logprobs": 2},
    {"stop": ("1", "a3", "=-b"), "min_tokens": 3},
    {"stop_token_ids": (3, 4, 5), "top_k": 5, "prompt_logprobs": True},
    {"top_p": 0.8, "temperature": 0.7, "min_p": 0.05, "stop": ("0",)},
]


@dataclass(frozen=True)
class Add:
    prompt: int
    rules: int
    n: int
    max_tokens: int
    priority: int


@dataclass(frozen=True)
class Abort:
    request: int


@dataclass(frozen=True)
class Update:
    recompute: bool


@dataclass(frozen=True)
class Steps:
    count: int


Event = Add | Abort | Update | Steps
adds = st.builds(
    Add,
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, len(RULES) - 1),
    st.integers(1, 3),
    st.integers(9, 20),
    st.integers(-1, 1),
)
events = st.lists(
    st.one_of(adds, adds, st.builds(Abort, st.integers(0, 8)), st.builds(Update, st.booleans()))
    | st.builds(Steps, st.integers(1, 4)),
    max_size=16,
)
ROOM: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_tokens": 8192, "block_size": 4, "max_tokens_per_step": 4096}
pools = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 5),
        "kv_cache_tokens": st.sampled_from([40, 52, 80, 400]),
        "block_size": st.sampled_from([1, 4, 8]),
        "max_tokens_per_step": st.sampled_from([1, 3, 7, 64]),
        "prefix_caching": st.booleans(),
        "batching": st.sampled_from(["continuous", "continuous", "static"]),
    }
)


class History:
    """One engine through one history."""

    def __init__(self, folder: str, *, moved: bool, **options: Any) -> None:
        self.llm = LLM(folder, threads=1, **options)
        self.moved = moved
        self.ids: list[str] = []
        self.done: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()

    def play(self, history: list[Event]) -> None:
        for event in history:
            self.apply(event)
        for _ in range(3000):
            if not self.llm.has_unfinished():
                break
            self.step()
        assert not self.llm.has_unfinished() and self.done.keys() == set(self.ids)
        stats = self.llm.stats()
        assert stats["running"] == stats["waiting"] == stats["kv_usage"] == 0
        assert not self.llm.engine._flights

    def apply(self, event: Event) -> None:
        match event:
            case Add(prompt, rules, n, max_tokens, priority):
                params = SamplingParams(n=n, max_tokens=max_tokens, seed=len(self.ids), **RULES[rules])
                self.ids.append(self.llm.add_request(PROMPTS[prompt], params, priority=priority))
            case Abort(request) if request < len(self.ids):
                if self.llm.abort(self.ids[request]):
                    self.aborted.add(self.ids[request])
            case Update(recompute):
                version = self.llm.engine.version + 1
                generator = torch.Generator().manual_seed(version)
                scale = 0.1 if self.moved else 0.0
                update = [
                    (name, tensor + scale * torch.randn(tensor.shape, generator=generator))
                    for name, tensor in self.llm.engine.decoder.tensors.items()
                ]
                self.llm.update_weights(update, version, kv="recompute" if recompute else "keep")
            case Steps(count):
                for _ in range(count):
                    self.step()

    def step(self) -> None:
        for output in self.llm.step():
            assert output.request_id not in self.done, "told twice"
            self.done[output.request_id] = output


def seen(output: RequestOutput, *, versions: bool) -> Any:
    """All that a caller gets of a request; versions and KV events depend on when it was admitted."""
    return output.prompt_logprobs, [
        (s.token_ids, s.text, s.logprobs, s.raw_logprobs, s.top_logprobs, s.finish_reason, s.error)
        + ((s.version_spans, s.kv_events) if versions else ())
        for s in output.samples
    ]


@settings(max_examples=60, deadline=None)
@given(history=events)
def test_with_room_for_all_nothing_differs_whatever_happens_when(model_folder: str, history: list[Event]) -> None:
    """Also the moment of aborts and of updates that move every weight: they wait for what is in flight."""
    plain, overlapped = (History(model_folder, moved=True, overlap=o, **ROOM) for o in (False, True))
    for one in (plain, overlapped):
        one.play(history)
    assert plain.aborted == overlapped.aborted
    for request_id, output in plain.done.items():
        assert seen(overlapped.done[request_id], versions=True) == seen(output, versions=True)


TIGHT = {"max_num_seqs": 3, "kv_cache_tokens": 40, "block_size": 1, "max_tokens_per_step": 3, "prefix_caching": False}


@settings(max_examples=80, deadline=None)
@given(history=events, options=pools)
@example(  # prompt logprobs of chunks that differ
    history=[Add(0, 0, 1, 9, 0), Add(0, 0, 2, 9, 0), Add(4, 6, 1, 9, 0)], options=TIGHT | {"batching": "continuous"}
)
def test_in_a_crowd_tokens_do_not_differ(model_folder: str, history: list[Event], options: Any) -> None:
    """A slot is free one step later, so who runs when may differ, and what an abort leaves by a few tokens."""
    plain, overlapped = (History(model_folder, moved=False, overlap=o, **options) for o in (False, True))
    for one in (plain, overlapped):
        one.play(history)
    for request_id, output in plain.done.items():
        if request_id not in plain.aborted | overlapped.aborted:
            assert seen(overlapped.done[request_id], versions=False) == seen(output, versions=False)
            continue
        for a, b in zip(output.samples, overlapped.done[request_id].samples, strict=True):
            both = min(len(a.token_ids), len(b.token_ids))
            assert a.token_ids[:both] == b.token_ids[:both] and a.logprobs[:both] == b.logprobs[:both]
    for sample in (s for output in overlapped.done.values() for s in output.samples):
        assert sum(end - start for _, start, end in sample.version_spans) == len(sample.token_ids)


def test_a_stop_found_late_wastes_one_slot_and_a_length_none(model_folder: str) -> None:
    params = SamplingParams(max_tokens=20, seed=2)
    for ends, wasted in (({"ignore_eos": True}, 0), ({"stop_token_ids": tuple(range(20))}, 1)):
        stats = []
        for overlap in (False, True):
            llm = LLM(model_folder, threads=1, overlap=overlap, max_num_seqs=1)
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=20, seed=params.seed, **ends))  # type: ignore[arg-type]
            stats.append(llm.stats())
        plain, overlapped = stats
        assert overlapped["steps"] - plain["steps"] == wasted
        for name in ("output_tokens", "slot_steps_used", "prefill_tokens_computed", "recomputed_tokens", "finished"):
            assert overlapped[name] == plain[name], name


def test_the_host_reads_a_token_only_after_the_next_step_was_launched(model_folder: str) -> None:
    llm = LLM(model_folder, threads=1, overlap=True)
    llm.add_request(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
    (sequence,) = next(iter(llm.engine.requests.values())).sequences
    known = []
    while llm.has_unfinished():
        llm.step()
        known.append((sequence.num_output, sequence.in_flight))
    assert known == [(0, 1), (1, 1), (2, 1), (3, 0)] and llm.stats()["steps"] == 3


def test_a_broken_row_is_told_one_step_late_and_its_neighbours_go_on(model_folder: str) -> None:
    poisoned = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    outs = []
    for overlap in (False, True):
        llm = LLM(model_folder, threads=1, overlap=overlap)
        llm.engine.decoder.embedding[15] = torch.nan
        outs.append(llm.generate([PROMPTS[0], [15, 1], PROMPTS[1]], poisoned))
    for plain, overlapped in zip(*outs, strict=True):
        assert [s.error for s in overlapped.samples] == [s.error for s in plain.samples]
        assert [s.token_ids for s in overlapped.samples] == [s.token_ids for s in plain.samples]
    assert outs[1][1].samples[0].error == "the logits of output token 0 are not finite"


def test_on_a_cpu_the_plain_loop_is_the_default(model_folder: str) -> None:
    llm = LLM(model_folder, threads=1)
    llm.add_request(PROMPTS[0], SamplingParams(max_tokens=1))
    assert len(llm.step()) == 1 and not llm.has_unfinished()
