"""The peak that all shares are shares of: what the vendor says, else the best of what was measured."""

import time
from functools import partial

import numpy as np

from olmorl.contract.peaks import MATRIX, STREAM, best_seconds, measured_peak, vendor_peak


def test_known_gpus_have_their_vendors_figures() -> None:
    known = vendor_peak("NVIDIA H100 80GB HBM3")
    assert known is not None and (known.flops, known.bandwidth) == (990e12, 3.35e12)
    assert known.source == "vendor figures for H100"
    assert vendor_peak("NVIDIA GeForce RTX 4090") is None


def test_the_fastest_product_counts() -> None:
    """Beside numpy's own one that takes no time at all."""
    ones = partial(np.ones, dtype=np.float32)
    alone = measured_peak(ones)
    cheating = measured_peak(ones, threads=3, products=[lambda matrix: lambda: matrix])
    assert cheating.flops > 100 * alone.flops > 100 * 2 * MATRIX**3
    assert cheating.source == "measured float32 product and streaming read, 3 threads"
    assert STREAM * 4 < alone.bandwidth < 1e13


def test_what_is_timed_is_the_fastest_run_and_none_that_is_still_going_on() -> None:
    """Work that is only launched is waited for; the first run, which may compile, is not counted."""
    delays = iter([0.05, *[0.012, 0.004] * 100])
    seconds = best_seconds(lambda: None, synchronize=lambda: time.sleep(next(delays)))
    assert 0.004 <= seconds < 0.012
