"""The script of `make gpu-check`: its dry run, and what it says on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parents[2]


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "inference.gpu_check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, env=environment, timeout=280)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real run is the test there")
def test_dry_run_goes_through_everything(tmp_path: Path) -> None:
    done = run_check("--dry", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report["tests_passed"]
    kinds = {figure["what"].split(" ")[0] for figure in report["figures"]}
    assert kinds == {"copy", "attention", "graph", "decode", "prefill"}
    assert all(figure["value"] > 0 for figure in report["figures"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is none")
def test_without_a_gpu_it_says_so() -> None:
    done = run_check()
    assert done.returncode == 0
    assert "no CUDA device here" in done.stdout and "`make gpu-check ARGS=--dry`" in done.stdout
