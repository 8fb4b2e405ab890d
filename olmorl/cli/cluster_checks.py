"""Is every node of the cluster fit, do all hold the same software, and how fast are the ways between them?"""

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from olmorl.cli.finding import Finding
from olmorl.cli.run_checks import check_split
from olmorl.config.schema import Config
from olmorl.contract.errors import OlmoRLError, PlacementError
from olmorl.controller.cluster import Cluster, Remote
from olmorl.controller.placement import Node, gpu_types, plan_placement

PROBE = "olmorl.cli.node_probe:NodeProbe"
START_SECONDS = 120.0
ANSWER_SECONDS = 90.0
SENT_BYTES = 64 << 20
LINKS = {"gloo": ("GLOO_SOCKET_IFNAME", 0.1), "nccl": ("NCCL_SOCKET_IFNAME", 1.0)}
"""what picks the interface, and GB/s below which a link is slow"""
CLOCK_SECONDS = 0.5


def check_cluster(address: str, config: Config | None) -> Iterator[Finding]:
    """A process on each node, for as long as this takes; it takes no CPU or GPU from anyone."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        try:
            with Cluster(address=address, cpus=0, log_dir=Path(folder)) as cluster:
                nodes = cluster.nodes()
                yield Finding("ok", f"cluster at {address}: {'; '.join(map(str, nodes))}")
                if config is not None:
                    yield _check_placement(config, nodes)
                probes = [cluster.spawn_on(node, f"probe-{rank}") for rank, node in enumerate(nodes)]
                paths = [] if config is None else _paths(config)
                yield from asyncio.run(_survey(probes, nodes, paths))
        except OlmoRLError as error:
            yield Finding(
                "fail", f"cluster at {address}: {error}", "see `ray status` on its head, and the firewall rules"
            )


def _check_placement(config: Config, nodes: list[Node]) -> Finding:
    if config.cluster.split == "auto":
        return check_split(nodes)
    placement = plan_placement(config, nodes)
    try:
        placement.check(nodes)
    except PlacementError as error:
        return Finding("fail", str(error))
    kinds = gpu_types(nodes)
    if len(kinds) > 1 and None in (config.inference.gpu_type, config.learner.gpu_type):
        what = f"placement: {placement.describe()}, on GPUs of several kinds: {', '.join(kinds)}"
        return Finding("warn", what, "inference.gpu_type and learner.gpu_type choose; updates wait for the slowest")
    return Finding("ok", f"placement: {placement.describe()}")


def _paths(config: Config) -> list[str]:
    """What workers read; a model without a leading slash may as well be a hub id."""
    return [config.model.path] if config.model.path.startswith("/") else []


async def _survey(probes: list[Remote], nodes: list[Node], paths: list[str]) -> list[Finding]:
    size = len(probes)
    starts = (probe.start(PROBE, rank, size, timeout=START_SECONDS) for rank, probe in enumerate(probes))
    findings: list[Finding] = []
    standing = []
    for node, probe, result in zip(nodes, probes, await asyncio.gather(*starts, return_exceptions=True), strict=True):
        if isinstance(result, OlmoRLError):
            findings.append(Finding("fail", f"{node.name}: {result}", "see that olmorl is installed there, as here"))
        elif isinstance(result, BaseException):
            raise result
        else:
            standing.append((node, probe))
    for node, probe in standing:
        reported = await probe.call("findings", paths, timeout=ANSWER_SECONDS)
        bad = [finding for finding in reported if finding.status != "ok"]
        findings += bad or [Finding("ok", f"{node.name}: {len(reported)} checks of its own")]
    findings += await _compare_versions(standing)
    findings += [await _check_clock(node, probe) for node, probe in standing]
    if len(standing) == size > 1:
        backends = ["gloo", "nccl"] if all(node.gpus for node in nodes) else ["gloo"]
        findings += await _measure_links(nodes, probes, backends)
    return findings


async def _compare_versions(standing: list[tuple[Node, Remote]]) -> list[Finding]:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node, probe in standing:
        for package, version in (await probe.call("versions", timeout=ANSWER_SECONDS)).items():
            found[package][version].append(node.name)
    different = [
        f"{package} is " + ", ".join(f"{version} on {' '.join(names)}" for version, names in versions.items())
        for package, versions in found.items()
        if len(versions) > 1
    ]
    fix = "install the same everywhere: pip install -c constraints.txt olmorl"
    return [Finding("fail", what, fix) for what in different] or [Finding("ok", "all nodes hold the same versions")]


async def _check_clock(node: Node, probe: Remote) -> Finding:
    """Half the time of the question is the doubt about it, so the quickest of some counts."""
    doubt, offset = min([await _ask_clock(probe) for _ in range(5)], key=lambda asked: asked[0])
    what = f"{node.name}: clock {offset:+.3f} s from here (to within {doubt:.3f} s)"
    if abs(offset) > CLOCK_SECONDS + doubt:
        return Finding("warn", what, "let chrony or systemd-timesyncd set it; times in rollouts and logs will be wrong")
    return Finding("ok", what)


async def _ask_clock(probe: Remote) -> tuple[float, float]:
    before = time.time()
    theirs = await probe.call("clock", timeout=ANSWER_SECONDS)
    after = time.time()
    return (after - before) / 2, theirs - (before + after) / 2


async def _measure_links(nodes: list[Node], probes: list[Remote], backends: list[str]) -> list[Finding]:
    """Each node to the next, one pair at a time, the last to the first."""
    findings: list[Finding] = []
    host = nodes[0].name
    port = await probes[0].call("host_store", host, timeout=ANSWER_SECONDS)
    for backend in backends:
        variable, _ = LINKS[backend]
        try:
            joins = (probe.call("join", backend, host, port, timeout=ANSWER_SECONDS) for probe in probes)
            await asyncio.gather(*joins)
            findings += [await _measure_link(nodes, probes, sender, backend) for sender in range(len(probes))]
        except OlmoRLError as error:
            fix = f"open all ports between the nodes; {variable} on a node picks another interface"
            findings.append(Finding("fail", f"the nodes cannot reach each other through {backend}: {error}", fix))
    return findings


async def _measure_link(nodes: list[Node], probes: list[Remote], sender: int, backend: str) -> Finding:
    receiver = (sender + 1) % len(probes)
    calls = [
        probes[i].call("pass_on", sender, receiver, SENT_BYTES, timeout=ANSWER_SECONDS) for i in (sender, receiver)
    ]
    speed = SENT_BYTES / max(await asyncio.gather(*calls)) / 1e9
    what = f"{backend} from {nodes[sender].name} to {nodes[receiver].name}: {speed:.2f} GB/s"
    variable, slow = LINKS[backend]
    if speed < slow:
        fix = f"set {variable} to the fast interface on every node, or see who else uses the network"
        return Finding("warn", what, fix)
    return Finding("ok", what)
