"""The peak begins anew, and sees what was held in between."""

import subprocess
import sys

import pytest

# A process of its own: one that has freed much takes new memory from what it kept, and its peak does not move.
SCRIPT = """
import torch
from learner.memory import peak_bytes, reset_peak
cpu = torch.device("cpu")
reset_peak(cpu)
before = peak_bytes(cpu)
block = torch.ones(64 << 18)
del block
held = peak_bytes(cpu)
reset_peak(cpu)
print(before, held, peak_bytes(cpu))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak counts from the start of the process")
def test_the_peak_of_a_while() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, held, after = map(int, done.stdout.split())
    assert held - before > 60 << 20
    assert after < held - (30 << 20)
