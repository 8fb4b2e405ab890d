"""The run's metrics for Prometheus, on one port of the driver: it has every worker's counters within a second anyway,
so nothing else needs to be found and scraped.

`olmorl_<group>_<name>` are the metrics of the last step; `olmorl_worker_<counter>_total` count since a worker's start.
"""

import json
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from olmorl.contract.errors import ConfigError
from olmorl.metrics.names import METRIC_NAMES
from olmorl.metrics.rollout_log import RolloutRow

Counters = Mapping[str, Mapping[str, float]]
WORKER_COUNTERS = {
    "output_tokens": "Tokens drawn.",
    "prefill_tokens_computed": "Prompt tokens computed.",
    "prefill_tokens_shared": "Prompt tokens that a group mate or the prefix cache had.",
    "recomputed_tokens": "Tokens computed again after a preemption or an update.",
    "steps": "Engine steps.",
    "busy_seconds": "Seconds in steps.",
    "prefill_seconds": "Seconds in steps that computed any prompt token.",
    "stall_seconds": "Seconds that weight updates held the engine up.",
    "flops": "FLOPs of the steps, by the formulas of docs/numerics.md.",
    "bytes": "Bytes that the steps had to move, by the formulas of docs/numerics.md.",
    "preemptions": "Sequences preempted.",
    "drafted_tokens": "Tokens guessed (inference.speculative).",
    "accepted_tokens": "Of those, the right ones.",
    "updates": "Weight updates applied.",
    "finished": "Samples finished.",
    "errors": "Samples ended by an error.",
}
WORKER_GAUGES = {
    "running": "Sequences in the batch.",
    "waiting": "Sequences that wait for a slot.",
    "kv_usage": "Share of the KV pool in use.",
    "version": "Policy version served.",
}
_BRACKETED = re.compile(r"<\w+>")


def exported_names() -> set[str]:
    """Every name that can be queried; of families with a free word (`eval/<set>/avg_at_k`) the part is a label."""
    steps = {_exported(name) for name in METRIC_NAMES}
    workers = {f"olmorl_worker_{name}_total" for name in WORKER_COUNTERS} | {
        f"olmorl_worker_{g}" for g in WORKER_GAUGES
    }
    return steps | workers


class PrometheusSink(Collector):
    """`counters` gives each worker's newest counters, in a mapping that may change while it is read; those of one
    worker are one snapshot, which is replaced and never changed. Port 0 takes a free one.

    The address is written to `targets` in the form of Prometheus' file_sd, so that its configuration need not know it.
    """

    def __init__(self, *, host: str, port: int, targets: Path, run: str, counters: Callable[[], Counters]) -> None:
        self._counters = counters
        self._run = run
        self._row: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"logging.prometheus_port = {port}: cannot listen on {host}: {error.strerror}; 0 takes a free port"
            ) from None
        self.port = int(self._server.server_port)
        self._targets = targets
        shown = socket.gethostname() if host in ("0.0.0.0", "") else host
        targets.write_text(json.dumps([{"targets": [f"{shown}:{self.port}"], "labels": {"job": "olmorl"}}]) + "\n")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._row = {**metrics, "progress/step": step}

    def write_samples(self, version: int, samples: Mapping[str, Sequence[RolloutRow]]) -> None:
        """Numbers alone are exported."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._targets.unlink(missing_ok=True)

    def collect(self) -> Iterable[Metric]:
        """On a thread of the server, while the run goes on: one row, and one snapshot of each worker, for all of it."""
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in self._row.items():
            exported, word = _prometheus_name(name)
            labels = ["run"] if word is None else ["run", "of"]
            family = families.setdefault(
                exported, GaugeMetricFamily(exported, f"{name} of the last step.", labels=labels)
            )
            family.add_metric([self._run] if word is None else [self._run, word], value)
        yield from families.values()
        workers = dict(self._counters())  # in one go: the run adds and removes workers meanwhile
        for counter, says in WORKER_COUNTERS.items():
            yield self._of_workers(CounterMetricFamily, counter, says, workers)
        for gauge, says in WORKER_GAUGES.items():
            yield self._of_workers(GaugeMetricFamily, gauge, says, workers)

    def _of_workers(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, says: str, workers: Counters
    ) -> Metric:
        family = kind(f"olmorl_worker_{name}", says, labels=["run", "worker"])
        for worker, counters in workers.items():
            if name in counters:
                family.add_metric([self._run, worker], counters[name])
        return family


def _prometheus_name(name: str) -> tuple[str, str | None]:
    """The exported name, and the free word of a declared family with one, which becomes the label `of`."""
    if name not in METRIC_NAMES:
        for declared, pattern in _FAMILIES:
            if found := pattern.fullmatch(name):
                return _exported(declared), found[1]
    return _exported(name), None


def _exported(name: str) -> str:
    return "olmorl_" + re.sub(r"\W+", "_", _BRACKETED.sub("of", name))


_FAMILIES = [(name, re.compile(_BRACKETED.sub("([^/]+)", name))) for name in METRIC_NAMES if _BRACKETED.search(name)]
