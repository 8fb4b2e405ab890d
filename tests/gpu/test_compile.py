"""Every kernel becomes machine code for every CUDA target and keeps all its values in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiled for the GPU that is here by all other tests"
)

_ROOT = Path(__file__).parents[2]
# A process of its own: what was imported for the interpreter cannot be compiled any more.
_SCRIPT = """
import json, sys
from inference.kernels import gpu_report as report
wanted, target = json.loads(sys.argv[1]), sys.argv[2]
for shape in report.SHAPES:
    if shape.name in wanted:
        for one in report.configurations(shape):
            found = report.resources(one.launch, report.TARGETS[target])
            print(json.dumps([shape.name, one.kernel, found.registers, found.spill_bytes, found.shared_bytes]))
"""
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
SHAPES = [
    "SmolLM2-135M",
    "Llama-3.1-8B",
    "Qwen2.5-0.5B",
    "Qwen3-8B",
    "OLMo-2-1B",
    "OLMo-3-7B",
    "96 a head",
    "Llama-3.1-8B fp16",
    "SmolLM2-135M fp32",
    "OLMo-3-7B fp32",
]


def check(names: list[str], target: str, least: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _SCRIPT, json.dumps(names), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= least
    assert not [row for row in rows if row[3] > 0], "spills"
    assert not [row for row in rows if row[4] > SHARED_LIMITS[target]], "shared memory"


@pytest.mark.parametrize(("name", "target"), [("OLMo-3-7B", "sm_90")])
def test_a_slice_compiles_without_spills(name: str, target: str) -> None:
    check([name], target, 15)


@pytest.mark.soak
@pytest.mark.parametrize("target", SHARED_LIMITS)
@pytest.mark.parametrize("name", SHAPES)
def test_everything_compiles_without_spills(name: str, target: str) -> None:
    check([name], target, 9)
