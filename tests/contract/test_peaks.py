"""The peak that all shares are shares of: what the vendor says, else the best of what was measured."""

import time
from functools import partial

import numpy as np
import pytest

from olmorl.contract import peaks
from olmorl.contract.peaks import CPU_PROBE, Probe, best_seconds, gpu_peak, measured_peak, vendor_peak


@pytest.mark.parametrize(
    ("name", "tera_flops", "tera_bytes", "sheet"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 2.04, "NVIDIA A100"),
        ("A100-SXM4-40GB", 312, 1.555, "NVIDIA A100"),  # as old drivers have it
        ("NVIDIA A100 80GB PCIe", 312, 1.935, "NVIDIA A100"),
        ("NVIDIA H100 80GB HBM3", 990, 3.35, "NVIDIA H100 (SXM)"),
        ("NVIDIA H100 PCIe", 756, 2.0, "NVIDIA H100 (PCIe)"),
        ("NVIDIA H100 NVL", 835, 3.9, "NVIDIA H100 (NVL)"),
        ("NVIDIA H200", 990, 4.8, "NVIDIA H200 (SXM)"),
        ("NVIDIA H200 NVL", 835, 4.8, "NVIDIA H200 (NVL)"),
        ("NVIDIA GH200 480GB", 990, 4.0, "NVIDIA GH200 (96 GB of HBM3)"),
        ("NVIDIA GH200 144G HBM3e", 990, 4.9, "NVIDIA GH200 (144 GB of HBM3e)"),
        ("NVIDIA B200", 2250, 8.0, "NVIDIA HGX B200"),
        ("NVIDIA GB200", 2500, 8.0, "NVIDIA GB200 NVL72"),
        ("NVIDIA L4", 121, 0.3, "NVIDIA L4"),
        ("NVIDIA L40", 181, 0.864, "NVIDIA L40"),
        ("NVIDIA L40S", 362, 0.864, "NVIDIA L40S"),
        ("AMD Instinct MI300X", 1307, 5.3, "AMD Instinct MI300X"),
    ],
)
def test_known_gpus_have_their_vendors_figures(name: str, tera_flops: float, tera_bytes: float, sheet: str) -> None:
    known = vendor_peak(name)
    assert known is not None and (known.flops, known.bandwidth) == (tera_flops * 1e12, tera_bytes * 1e12)
    assert known.source == f"vendor figures, data sheet of {sheet}"


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of one
        "NVIDIA H100",
        "NVIDIA A1000",
        "NVIDIA GB2000",
        "NVIDIA H200 480GB",
        "AMD Instinct MI300A",
        "",
    ],
)
def test_an_unknown_gpu_is_measured_and_that_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vendor_peak(name) is None
    monkeypatch.setattr(peaks, "GPU_PROBE", Probe(64, 1 << 10, "float32", 4))
    monkeypatch.setattr(peaks, "SECONDS", 0.001)
    peak = gpu_peak(name, partial(np.ones, dtype=np.float32), synchronize=lambda: None)
    assert peak.flops > 0 and peak.bandwidth > 0
    told = f"measured float32 product and streaming read: no vendor figures are known here for {name!r}"
    assert peak.source == told and told in str(peak)


def test_the_fastest_product_counts() -> None:
    """Beside numpy's own one that takes no time at all."""
    ones = partial(np.ones, dtype=np.float32)
    alone = measured_peak(ones)
    cheating = measured_peak(ones, threads=3, products=[lambda matrix: lambda: matrix])
    assert cheating.flops > 100 * alone.flops > 100 * 2 * CPU_PROBE.matrix**3
    assert cheating.source == "measured float32 product and streaming read, 3 threads"
    assert CPU_PROBE.stream * 4 < alone.bandwidth < 1e13


def test_what_is_timed_is_the_fastest_run_and_none_that_is_still_going_on() -> None:
    """Work that is only launched is waited for; the first run, which may compile, is not counted."""
    delays = iter([0.05, *[0.012, 0.004] * 100])
    seconds = best_seconds(lambda: None, synchronize=lambda: time.sleep(next(delays)))
    assert 0.004 <= seconds < 0.012
