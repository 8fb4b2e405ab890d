"""The Python face of the engine: prompts in, finished samples out."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from inference.engine import Engine, KvPolicy
from inference.request import Request, Sequence
from inference.stopping import output_text
from inference.tokenizer import Tokenizer
from olmorl.contract.generation import EngineConfig, FinishReason, KvEvent, SamplingParams, VersionSpan

Prompt = str | Items[int] | np.ndarray


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
    """An engine in this process. `step` drives it; `generate` does so until its own requests are done."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_num_seqs: int = 64,
        kv_cache_tokens: int = 65536,
        block_size: int = 16,
        max_tokens_per_step: int = 2048,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        config = EngineConfig(
            model=str(model),
            dtype=dtype,
            device=device,
            max_num_seqs=max_num_seqs,
            kv_cache_tokens=kv_cache_tokens,
            block_size=block_size,
            max_tokens_per_step=max_tokens_per_step,
            max_model_len=max_model_len,
            prefix_caching=prefix_caching,
            seed=seed,
        )
        self.engine = Engine(config)
        self._num_requests = 0
        self._aborted: list[RequestOutput] = []

    def generate(
        self, prompts: Items[Prompt], params: SamplingParams | Items[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """In the order of `prompts`. Refuses the whole call, before anything starts, if one prompt is bad."""
        if isinstance(prompts, str):
            raise ValueError("prompts is a single string; give a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one, or one for each")
        ids = [self._token_ids(prompt) for prompt in prompts]
        for index, (prompt, one) in enumerate(zip(ids, each, strict=True)):
            try:
                self.engine.check(prompt, one)
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

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> str:
        return self._add(self._token_ids(prompt), params or SamplingParams(), priority=priority)

    def step(self) -> list[RequestOutput]:
        """One engine step; the requests all of whose samples are finished now."""
        outputs, self._aborted = self._aborted, []
        finished = {id(sequence.request): sequence.request for sequence in self.engine.step()}
        return outputs + [self._output(request) for request in finished.values() if request.finished]

    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished or bool(self._aborted)

    def abort(self, request_id: str) -> bool:
        """The request comes out of the next `step` with what it had. False for an unknown or finished id."""
        aborted = self.engine.abort(request_id)
        if aborted:
            self._aborted.append(self._output(aborted[0].request))
        return bool(aborted)

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, kv: KvPolicy = "keep"
    ) -> None:
        """Between two steps, in place. All or nothing: WeightUpdateError leaves the old weights serving."""
        self.engine.update_weights(named_tensors, version, kv=kv)

    def weights_checksum(self) -> str:
        return self.engine.weights_checksum()

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    def score(self, sequences: Items[np.ndarray]) -> list[np.ndarray]:
        return self.engine.score(sequences)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        return [int(token) for token in prompt]

    def _add(self, prompt: list[int], params: SamplingParams, *, priority: int = 0) -> str:
        request_id = str(self._num_requests)
        self._num_requests += 1
        self.engine.add(request_id, prompt, params, priority=priority)
        return request_id

    def _output(self, request: Request) -> RequestOutput:
        samples = [SampleOutput(sequence, self.engine.tokenizer) for sequence in request.sequences]
        return RequestOutput(request.request_id, request.prompt, samples, request.prompt_logprobs)
