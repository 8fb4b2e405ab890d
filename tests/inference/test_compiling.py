"""The first call of the CPU kernels compiles for minutes: it says so, once, and only then."""

import os
import subprocess
import sys
from pathlib import Path

_CALLS = """
import numpy as np
from inference.kernels.cpu_team import new_signals, take, meet
signals = new_signals(2)
take(signals, 0, 1), meet(signals, 1, 0)
"""


def test_only_a_compilation_is_announced_and_once(tmp_path: Path) -> None:
    def said() -> int:
        ran = subprocess.run(
            [sys.executable, "-c", _CALLS],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stderr.count("compiling the CPU kernels")

    assert (said(), said()) == (1, 0)
