"""Seconds of a piece of work on the device, and its replay as a CUDA graph."""

import statistics
import time
from collections.abc import Callable

import torch

_REPEATS = 5  # measurements, of which the median counts
Work = Callable[[], object]


def seconds_of(work: Work, device: torch.device, *, budget: float) -> float:
    """The median over measurements that together take about `budget` seconds (one if 0), after a warm-up."""
    work()
    if budget == 0:
        return _elapsed(work, device, 1)
    once = _elapsed(work, device, 1)
    count = max(1, int(budget / _REPEATS / max(once, 1e-6)))
    return statistics.median(_elapsed(work, device, count) for _ in range(_REPEATS)) / count


def _elapsed(work: Work, device: torch.device, count: int) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(count):
            work()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def captured(work: Work, device: torch.device) -> Work:
    """The work as a graph to be replayed; on a CPU the work itself."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles kernels and sets libraries up, which no graph may hold
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
