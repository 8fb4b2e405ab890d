"""`/metrics`: vLLM's names where they mean the same, so that its dashboards read this server too."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inference.server.generation import Generation, Generations

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_GAUGES = {
    "vllm:num_requests_running": ("running", "Samples in the batch."),
    "vllm:num_requests_waiting": ("waiting", "Samples that wait for a slot."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of KV blocks in use, 1 is all."),
    "olmorl:weight_version": ("version", "Policy version that is served."),
    "olmorl:live_batch_mean": ("mean_live_batch", "Samples a step, mean since the start."),
    "olmorl:slot_waste": ("slot_waste", "Share of slot-steps that made no token since the start."),
}
_COUNTERS = {
    "vllm:generation_tokens": ("output_tokens", "Tokens drawn."),
    "vllm:num_preemptions": ("preemptions", "Samples that gave their blocks back to go on later."),
    "vllm:prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_hits", "Prompt tokens found there."),
    "vllm:spec_decode_num_drafts": ("verifications", "Drafts that were judged."),
    "vllm:spec_decode_num_draft_tokens": ("drafted_tokens", "Tokens guessed."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Of those, the right ones."),
    "olmorl:prefill_tokens_computed": ("prefill_tokens_computed", "Prompt tokens computed."),
    "olmorl:prefill_tokens_shared": ("prefill_tokens_shared", "Prompt tokens a group mate or the cache had."),
    "olmorl:engine_steps": ("steps", "Steps of the engine."),
    "olmorl:engine_flops": ("flops", "Floating-point operations of those steps."),
    "olmorl:engine_bytes": ("bytes", "Bytes of weights and KV those steps moved."),
    "olmorl:weight_updates": ("updates", "Weight updates committed."),
    "olmorl:sample_errors": ("errors", "Samples the engine gave up."),
}


class _EngineCounters:
    """Read off the engine when asked."""

    def __init__(self, stats: Callable[[], dict[str, float]], model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for kind, names in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (key, text) in names.items():
                family = kind(name, text, labels=["model_name"])
                family.add_metric([self._model], stats[key])
                yield family


class ServerMetrics:
    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        labels = ["model_name"]
        self._ended = Counter(
            "vllm:request_success", "Samples ended, by reason.", [*labels, "finished_reason"], registry=self._registry
        )
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts.", labels, registry=self._registry)
        self._lengths = Histogram(
            "vllm:request_generation_tokens", "Tokens of a sample.", labels, buckets=_TOKENS, registry=self._registry
        )
        self._first = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request on.",
            labels,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._whole = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Until the last sample of a request.",
            labels,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._refused = Counter(
            "olmorl:requests_refused", "Requests answered with an error.", [*labels, "status"], registry=self._registry
        )

    def watch(self, generations: Generations) -> None:
        self._registry.register(_EngineCounters(generations.engine.stats, self._model))

    def ended(self, generation: Generation) -> None:
        """A request came to its end, whichever."""
        self._prompt.labels(self._model).inc(len(generation.prompt))
        self._whole.labels(self._model).observe(time.time() - generation.t_asked)
        for sequence in generation.sequences:
            self._ended.labels(self._model, sequence.finish_reason).inc()
            self._lengths.labels(self._model).observe(len(sequence.raw_logprobs))
            if sequence.t_first_token:
                self._first.labels(self._model).observe(sequence.t_first_token - generation.t_asked)

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
