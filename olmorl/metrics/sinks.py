"""Opens the sinks a config asks for."""

from collections.abc import Callable
from pathlib import Path

from olmorl.config.schema import Config
from olmorl.metrics.console_sink import ConsoleSink
from olmorl.metrics.jsonl_sink import JsonlSink
from olmorl.metrics.prometheus import Counters, PrometheusSink
from olmorl.metrics.sink import MetricSink
from olmorl.metrics.wandb_sink import open_wandb


def open_sinks(
    config: Config, directory: Path, *, first_step: int = 0, counters: Callable[[], Counters] = dict
) -> list[MetricSink]:
    """`first_step` is the last step already done when a run is resumed; `counters` gives each worker's newest
    counters. The caller closes what it gets."""
    sinks: list[MetricSink] = [JsonlSink(directory / "metrics.jsonl")]
    curves = open_wandb(
        directory,
        project=config.logging.wandb_project,
        name=config.run.name,
        mode=config.logging.wandb,
        config=config.model_dump(mode="json"),
    )
    if curves is not None:
        sinks.append(curves)
    if config.logging.prometheus_port is not None:
        sinks.append(
            PrometheusSink(
                host=config.logging.prometheus_host,
                port=config.logging.prometheus_port,
                targets=directory / "prometheus.json",
                run=config.run.name,
                counters=counters,
            )
        )
    if config.logging.console:
        sinks.append(ConsoleSink(config.run.steps, first_step=first_step))
    return sinks
