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


HOLES = """
import sys, torch, psutil
from learner.memory import return_freed_blocks

if sys.argv[1] == "return":
    return_freed_blocks()
held = lambda: psutil.Process().memory_info().rss
del (block := [torch.ones(4 << 20)])[0], block  # from now on the C library would keep blocks of this size
before = held()
blocks = [torch.ones(4 << 20) for _ in range(40)]
del blocks[::2]
print((held() - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of the C library of Linux")
def test_what_is_freed_between_blocks_goes_back() -> None:
    def held(how: str) -> float:
        return float(subprocess.run([sys.executable, "-c", HOLES, how], check=True, capture_output=True).stdout)

    assert held("return") < 20 * 16 + 32, "20 blocks of 16 MB are still used"
    assert held("keep") > 30 * 16, "else there is nothing to mend"
