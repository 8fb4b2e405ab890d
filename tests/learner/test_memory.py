"""The peak begins anew, and sees what was held in between."""

import sys

import pytest
import torch

from learner.memory import peak_bytes, reset_peak

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak counts from the start of the process")
def test_the_peak_of_a_while() -> None:
    reset_peak(CPU)
    before = peak_bytes(CPU)
    block = torch.ones(64 << 18)
    del block
    held = peak_bytes(CPU)
    assert held - before > 60 << 20
    reset_peak(CPU)
    assert peak_bytes(CPU) < held - (30 << 20)
