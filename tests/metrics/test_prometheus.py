"""What Prometheus reads, parsed by its official client; and the dashboard that asks for it."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from olmorl.contract.errors import ConfigError
from olmorl.metrics.names import METRIC_NAMES
from olmorl.metrics.prometheus import WORKER_COUNTERS, WORKER_GAUGES, PrometheusSink, exported_names

ROOT = Path(__file__).parents[2]
COUNTERS = {"inference-0": {"output_tokens": 7.0, "running": 3.0}, "inference-1": {"output_tokens": 9.0}}


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[PrometheusSink]:
    targets = tmp_path / "prometheus.json"
    sink = PrometheusSink(host="127.0.0.1", port=0, targets=targets, run="mine", counters=lambda: COUNTERS)
    yield sink
    sink.close()
    assert not targets.exists(), "a dead target stays listed"


def scraped(address: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(httpx.get(f"http://{address}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[
                tuple(sample.labels[label] for label in ("run", "of", "worker") if label in sample.labels)
            ] = sample.value
    return found


def test_the_last_step_and_every_worker_are_scraped(sink: PrometheusSink, tmp_path: Path) -> None:
    (target,) = json.loads((tmp_path / "prometheus.json").read_text())
    address = target["targets"][0]
    sink.write(1, {"reward/mean": 0.1})
    sink.write(2, {"reward/mean": 0.5, "reward/gsm8k/mean": 0.25, "reward/math/mean": 0.75, "eval/a/avg_at_k": 1.0})
    found = scraped(address)
    assert found["olmorl_reward_mean"] == {("mine",): 0.5} and found["olmorl_progress_step"] == {("mine",): 2.0}
    assert found["olmorl_reward_of_mean"] == {("mine", "gsm8k"): 0.25, ("mine", "math"): 0.75}
    assert found["olmorl_eval_of_avg_at_k"] == {("mine", "a"): 1.0}
    assert found["olmorl_worker_output_tokens_total"] == {("mine", "inference-0"): 7.0, ("mine", "inference-1"): 9.0}
    assert found["olmorl_worker_running"] == {("mine", "inference-0"): 3.0}


NASTY = 'a "quoted" C:\\new\\table\nand a line more, = {é}'


def test_any_name_is_a_label(tmp_path: Path) -> None:
    """Quotes, backslashes and line breaks come out of the official parser as they went in."""
    counters = {NASTY: {"running": 3.0}}
    sink = PrometheusSink(host="127.0.0.1", port=0, targets=tmp_path / "t", run=NASTY, counters=lambda: counters)
    sink.write(1, {f"reward/{NASTY}/mean": 0.25, f"eval/{NASTY}/avg_at_k": 0.5, "reward/mean": 1.0})
    try:
        found = scraped(f"127.0.0.1:{sink.port}")
    finally:
        sink.close()
    assert found["olmorl_reward_mean"] == {(NASTY,): 1.0}
    assert found["olmorl_reward_of_mean"] == {(NASTY, NASTY): 0.25}
    assert found["olmorl_eval_of_avg_at_k"] == {(NASTY, NASTY): 0.5}
    assert found["olmorl_worker_running"] == {(NASTY, NASTY): 3.0}


def test_a_scrape_while_the_run_goes_on_is_of_one_moment(tmp_path: Path) -> None:
    """Workers come, go and report, rows are written: no scrape fails, and no worker's counters are of two snapshots."""
    stats: dict[str, dict[str, float]] = {}
    sink = PrometheusSink(host="127.0.0.1", port=0, targets=tmp_path / "t", run="r", counters=lambda: stats)
    over = threading.Event()

    def run() -> None:
        number = 0
        while not over.is_set():
            number += 1
            for name in range(number % 40):
                stats[f"inference-{name}"] = dict.fromkeys(WORKER_COUNTERS, float(number))
            for name in range(number % 7):
                stats.pop(f"inference-{name}", None)
            sink.write(number, {"waste/trained": number, "waste/eval": number, f"reward/{number % 50}/mean": number})

    driver = threading.Thread(target=run)
    driver.start()
    torn, switch = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(30):
            found = scraped(f"127.0.0.1:{sink.port}")
            of_step = {value for name in found if "worker" not in name for value in found[name].values()}
            torn += [of_step] * (len(of_step) > 1)
            for worker in found.get("olmorl_worker_steps_total", {}):
                of_worker = {found[f"olmorl_worker_{counter}_total"].get(worker) for counter in WORKER_COUNTERS}
                torn += [of_worker] * (len(of_worker) > 1)
    finally:
        sys.setswitchinterval(switch)
        over.set()
        driver.join()
        sink.close()
    assert torn == []


def test_every_declared_metric_has_a_name_of_its_own(sink: PrometheusSink, tmp_path: Path) -> None:
    sink.write(1, {re.sub("<[a-z]+>", "word", name): 1.0 for name in METRIC_NAMES if name != "progress/step"})
    (target,) = json.loads((tmp_path / "prometheus.json").read_text())
    found = {name for name in scraped(target["targets"][0]) if not name.startswith("olmorl_worker_")}
    workers = {f"olmorl_worker_{name}_total" for name in WORKER_COUNTERS} | {
        f"olmorl_worker_{g}" for g in WORKER_GAUGES
    }
    assert found == exported_names() - workers and len(found) == len(METRIC_NAMES)


def test_a_taken_port_is_named(sink: PrometheusSink, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"prometheus_port = {sink.port}: cannot listen"):
        PrometheusSink(host="127.0.0.1", port=sink.port, targets=tmp_path / "x", run="b", counters=dict)


def test_every_query_of_the_grafana_dashboard_names_exported_metrics() -> None:
    dashboard = json.loads((ROOT / "launch" / "grafana" / "olmorl.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries.append(dashboard["templating"]["list"][1]["query"]["query"])
    named = {name for query in queries for name in re.findall(r"olmorl_\w+", query)}
    assert len(named) > 40 and named - exported_names() == set()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
