"""`olmorl doctor`: every check, each finding with its fix."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from olmorl.cli.cluster_checks import check_cluster
from olmorl.cli.finding import Finding
from olmorl.cli.machine_checks import check_machine
from olmorl.cli.package_checks import check_packages
from olmorl.cli.run_checks import check_run
from olmorl.cli.sandbox_checks import check_sandbox
from olmorl.config.load import load_config
from olmorl.contract.errors import ConfigError
from olmorl.controller.cluster import cluster_address

PROBE_TIMEOUT_SECONDS = 120


def examine(config_path: Path | None, overrides: Sequence[str] = ()) -> int:
    """Print all findings as they come; the exit code, 1 if anything failed."""
    counts = {"ok": 0, "warn": 0, "fail": 0}
    for finding in _findings(config_path, overrides):
        print(finding, flush=True)
        counts[finding.status] += 1
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["fail"] else 0


def _findings(config_path: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    yield from check_packages()
    yield from probe_torch()
    yield from check_machine(Path.cwd() if config_path is None else None)
    yield from check_sandbox()
    if config_path is not None:
        yield from check_run(config_path, overrides)
    yield from _cluster(config_path, overrides)


def _cluster(config_path: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    """Its nodes, where one is named: by the config, which was found good or bad before, or by RAY_ADDRESS."""
    try:
        config = None if config_path is None else load_config(config_path, overrides)
    except ConfigError:
        return
    address = cluster_address(None if config is None else config.cluster.address)
    if address is not None:
        yield from check_cluster(address, config)


def probe_torch() -> Iterator[Finding]:
    """In a process of its own: a command never imports torch, and a broken build may not only raise but crash."""
    command = [sys.executable, "-m", "olmorl.cli.torch_probe"]
    mend = "reinstall torch for this machine (pip install --force-reinstall torch)"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        yield Finding("fail", f"torch did not answer within {PROBE_TIMEOUT_SECONDS} s", mend)
        return
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        yield Finding("fail", f"torch does not work: {last[0]}", mend)
        return
    for finding in json.loads(done.stdout.splitlines()[-1]):
        yield Finding(**finding)
