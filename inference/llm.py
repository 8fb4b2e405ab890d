"""The Python face of the engine: prompts in, finished samples out."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference.device_peak import device_peak
from inference.engine import KvPolicy
from inference.recorded_engine import open_engine
from inference.request import Request, Sequence
from inference.stopping import output_text
from inference.tokenizer import Tokenizer
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, FinishReason, KvEvent, SamplingParams, VersionSpan
from olmorl.contract.peaks import DevicePeak

Prompt = str | Items[int] | np.ndarray
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class SampleOutput:
    """One finished sample."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer
        self.sample_index = sequence.sample_index
        self.token_ids: list[int] = sequence.output_ids
        self.logprobs: list[float] = sequence.logprobs
        self.raw_logprobs: list[float] = sequence.raw_logprobs
        self.top_logprobs: list[list[tuple[int, float]]] = sequence.top_logprobs
        self.version_spans: list[VersionSpan] = list(sequence.version_spans)
        self.kv_events: list[KvEvent] = list(sequence.kv_events)
        self.finish_reason: FinishReason | None = sequence.finish_reason
        self.error = sequence.error

    @cached_property
    def text(self) -> str:
        return output_text(self._sequence, self._tokenizer)

    def __repr__(self) -> str:
        return f"SampleOutput(token_ids={self.token_ids}, finish_reason={self.finish_reason!r}, error={self.error!r})"


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    samples: list[SampleOutput]
    prompt_logprobs: list[float | None] | None

    @property
    def finish_reason(self) -> FinishReason | None:
        """ "abort" when any sample was aborted, else that of the first."""
        reasons = [sample.finish_reason for sample in self.samples]
        return "abort" if "abort" in reasons else reasons[0]

    @property
    def error(self) -> str | None:
        return next((sample.error for sample in self.samples if sample.error is not None), None)


class LLM:
    """An engine in this process. `step` drives it; `generate` does so until its own requests are done.

    Options are the fields of `EngineConfig`, by keyword. A model is a Hugging Face folder or a hub id.

    >>> llm = LLM(model, max_num_seqs=8, kv_cache_tokens=4096)
    >>> params = SamplingParams(n=2, max_tokens=5, seed=1, ignore_eos=True)
    >>> outs = llm.generate([[1, 10, 2, 11], "3+4="], params)
    >>> [len(sample.token_ids) for sample in outs[0].samples], outs[1].samples[0].finish_reason
    ([5, 5], 'length')
    >>> outs[0].samples[0].version_spans
    [(0, 0, 5)]

    Requests may join and leave between two steps, and so may weights:

    >>> request_id = llm.add_request([1, 10, 2, 11], SamplingParams(max_tokens=4, ignore_eos=True))
    >>> llm.step()
    []
    >>> llm.update_weights([(name, tensor.clone()) for name, tensor in llm.engine.decoder.tensors.items()], version=7)
    >>> finished = []
    >>> while llm.has_unfinished():
    ...     finished += llm.step()
    >>> finished[0].request_id == request_id, finished[0].samples[0].version_spans
    (True, [(0, 0, 1), (7, 1, 4)])
    >>> llm.abort(request_id)
    False
    >>> llm.stats()["output_tokens"]
    24.0
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        config = EngineConfig(model=str(model), **_checked(options))
        self.engine = open_engine(config, name="llm", initial_version=0)
        self._num_requests = 0
        self._aborted: list[RequestOutput] = []

    def generate(
        self, prompts: Items[Prompt], params: SamplingParams | Items[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """In the order of `prompts`. Refuses the whole call, before anything starts, if one prompt is bad."""
        each = _one_for_each(prompts, params)
        ids: list[list[int]] = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                ids.append(self._token_ids(prompt))
                self.engine.check(ids[-1], one)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from None
        wanted = [self._add(prompt, one) for prompt, one in zip(ids, each, strict=True)]
        open_ids, done = set(wanted), {}
        while open_ids:
            for output in self.step():
                done[output.request_id] = output
                open_ids.discard(output.request_id)
        outputs = [done.pop(request_id) for request_id in wanted]
        self._aborted.extend(done.values())  # requests of add_request that finished meanwhile
        return outputs

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lengths: Items[int] | None = None,
        priority: int = 0,
    ) -> str:
        """`lengths` gives each of the `params.n` samples a max_tokens of its own."""
        return self._add(self._token_ids(prompt), params or SamplingParams(), lengths=lengths, priority=priority)

    def step(self) -> list[RequestOutput]:
        """One engine step; the requests all of whose samples are finished now."""
        outputs, self._aborted = self._aborted, []
        told = {output.request_id for output in outputs}
        finished = {sequence.request.request_id: sequence.request for sequence in self.engine.step()}
        return outputs + [self._output(r) for r in finished.values() if r.finished and r.request_id not in told]

    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished or bool(self._aborted)

    def abort(self, request_id: str) -> bool:
        """The request comes out of the next `step` with what it had. False for an unknown or finished id."""
        aborted = self.engine.abort(request_id)
        if aborted:
            self._aborted.append(self._output(aborted[0].request))
        return bool(aborted)

    def update_weights(self, named_tensors: NamedTensors, version: int, *, kv: KvPolicy = "keep") -> None:
        """Between two steps, in place. All or nothing: WeightUpdateError leaves the old weights serving."""
        self.engine.update_weights(_pairs(named_tensors), version, kv=kv)

    def update_draft_weights(self, named_tensors: NamedTensors) -> None:
        """Of the draft model, between two steps, in place, all or nothing. No token depends on them."""
        self.engine.speculation.update_weights(_pairs(named_tensors))

    def weights_checksum(self) -> str:
        return self.engine.weights_checksum()

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    def score(self, sequences: Items[np.ndarray]) -> list[np.ndarray]:
        return self.engine.score(sequences)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        ids = np.asarray(prompt)
        if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            raise ValueError(
                f"a prompt is text or a list of integer token ids, not {_shortened(prompt)}; chat messages are made "
                "into one by the tokenizer's apply_chat_template"
            )
        return [int(token) for token in ids]

    def device_peak(self) -> DevicePeak:
        """Of what this engine runs on, all its devices together."""
        peak, size = device_peak(self.engine.decoder.device), self.engine.decoder.ranks.size
        if size == 1:
            return peak
        return DevicePeak(size * peak.flops, size * peak.bandwidth, f"{size} times {peak.source}")

    def _add(
        self, prompt: list[int], params: SamplingParams, *, lengths: Items[int] | None = None, priority: int = 0
    ) -> str:
        request_id = str(self._num_requests)
        self._num_requests += 1
        self.engine.add(request_id, prompt, params, lengths=lengths, priority=priority)
        return request_id

    def _output(self, request: Request) -> RequestOutput:
        samples = [SampleOutput(sequence, self.engine.tokenizer) for sequence in request.sequences]
        return RequestOutput(request.request_id, request.prompt, samples, request.prompt_logprobs)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    known = [field.name for field in fields(EngineConfig) if field.name != "model"]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"options are {', '.join(known)}"
            raise ConfigError(f"LLM has no option {name!r}; {hint}")
    return options


def _one_for_each(
    prompts: Items[Prompt], params: SamplingParams | Items[SamplingParams] | None
) -> list[SamplingParams]:
    if isinstance(prompts, str):
        raise ValueError("prompts is a single string; give a list of prompts")
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    each = list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one, or one for each")
    for one in each:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"params holds {_shortened(one)}; give SamplingParams")
    return each


def _pairs(named: NamedTensors) -> Iterable[tuple[str, torch.Tensor]]:
    return named.items() if isinstance(named, Mapping) else named


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
