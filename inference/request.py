"""A request (n samples of one prompt) and its sequences (one a sample): the state everything else works on.

What a sequence still has to compute is one number, `num_tokens - num_computed`: chunked prefill, prefix-cache hits,
preemption and "recompute under new weights" all only change `num_computed`. No torch here.
"""

import hashlib
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from olmorl.contract.generation import FinishReason, KvEvent, SamplingParams, VersionSpan


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample: prompt and output tokens, its KV blocks, and what is recorded about each output token."""

    request: "Request"
    sample_index: int
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    """length at which it ends, prompt included"""
    num_computed: int = 0
    """leading tokens whose KV is in `blocks`"""
    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)
    """the same for layers with a sliding window, if the model has any; -1 where no later token looks"""
    num_slid: int = 0
    """leading entries of `window_blocks` that are -1"""
    num_shared: int = 0
    """leading blocks that another table may hold too; writing into one of them copies it first"""
    in_flight: int = 0
    """tokens behind `token_ids` that are drawn, but whose ids only the device knows yet"""
    drawn_row: int = -1
    """where among the ids of the newest draw that token is"""
    draft: list[int] = field(default_factory=list)
    """guesses at the tokens that come next, which this step computes and judges; empty between steps"""
    drafting: Any = None
    """what `inference.speculative` knows of this sample"""
    row: int = -1
    """slot of the batch while running, else -1"""
    order: int = 0
    """counts admissions; the highest is the newest"""
    block_hashes: list[bytes] = field(default_factory=list)
    """chain hashes of the leading full blocks that are known to the prefix cache"""
    publishable: bool = True
    """False once a weight update left KV of two versions in `blocks`"""

    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    span_starts: list[tuple[int, int]] = field(default_factory=list)  # (version, first output token)
    kv_events: list[KvEvent] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_matcher: Any = None
    """`stopping.StopMatcher` when the request has stop strings"""
    stop_text: str | None = None
    """the text before a stop string, when one ended the sample"""
    t_first_token: float = 0.0
    t_finished: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Those in flight included: what planning counts with."""
        return len(self.token_ids) + self.in_flight

    @property
    def num_output(self) -> int:
        """Output tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """(version, start, end) over output tokens; a partition of them."""
        starts = [*self.span_starts, (-1, self.num_output)]
        return tuple((version, start, end) for (version, start), (_, end) in pairwise(starts))


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """The computed prompt of a request, kept while samples still wait for a slot to begin from it."""

    leader: Sequence
    """whoever computed it"""
    blocks: list[int]
    window_blocks: list[int]
    kv_events: list[KvEvent]
    publishable: bool
    hidden: Any = None
    """hidden state of the last token, a tensor; None until it is computed"""


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int
    seed: int
    sample_indices: tuple[int, ...]
    stop_ids: frozenset[int]
    """EOS ids (unless ignored) and the request's own stop ids"""
    max_tokens: int
    """length at which its sequences end, prompt included"""
    priority: int = 0
    tag: Any = None
    """the caller's own; the engine never looks at it"""

    sequences: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    leader: Sequence | None = None
    """the sample that is prefilling the prompt for all"""
    shared_prompt: SharedPrompt | None = None
    num_cached: int = 0
    """prompt tokens that the prefix cache had when the request began"""
    prompt_logprobs: list[float | None] | None = None
    noise_key: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.sequences = [
            Sequence(self, i, list(self.prompt), len(self.prompt), self.max_tokens) for i in self.sample_indices
        ]
        self.waiting = deque(self.sequences)
        self.noise_key = prompt_noise_key(self.seed, self.prompt)
        if self.params.prompt_logprobs:
            self.prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)


def prompt_noise_key(seed: int, prompt: Items[int]) -> tuple[int, int]:
    """Two 32-bit words that key all randomness of a request: equal seeds on different prompts share no noise."""
    text = f"{seed}:{','.join(map(str, prompt))}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
