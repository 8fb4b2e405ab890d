"""`python -m inference.gpu_check [--dry] [--json FILE]`: is the GPU path right here, and how fast is it?

Runs the tests of tests/gpu on the device (kernels against their twins, engines of each family against transformers,
graphs against eager, a weight update with its KV kept), then the measurements, and prints one table. Exit code 1 if
anything was wrong; a goal that was missed is only said. Without a CUDA device it says so and does nothing; `--dry`
then goes through all of it in Triton's interpreter, on shapes so small that the figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.gpu_check.measurements import Row

_ROOT = Path(__file__).resolve().parents[2]
_DRY_TESTS = ("tests/gpu/test_norm.py",)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m inference.gpu_check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--dry", action="store_true", help="tiny shapes in the interpreter, without a GPU")
    parser.add_argument("--json", type=Path, default=_ROOT / "outputs" / "gpu_check.json", help="figures")
    options = parser.parse_args(arguments)
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    import torch

    if not options.dry and not torch.cuda.is_available():
        print("no CUDA device here: nothing to check (`make gpu-check ARGS=--dry` goes through it in the interpreter)")
        return 0
    started = time.perf_counter()
    tests = _run_tests(options.dry)
    tested = time.perf_counter()
    rows = []
    for row in _dry_rows() if options.dry else _rows():
        rows.append(row)
        print(f"{row.what:52}{row.value:12.1f} {row.unit:10} {row.verdict:9} {row.note}", flush=True)
    print(
        f"tests {'passed' if tests == 0 else 'FAILED'}; {tested - started:.0f} s + {time.perf_counter() - tested:.0f} s"
    )
    figures = [{"what": r.what, "value": r.value, "unit": r.unit, "goal": r.goal, "note": r.note} for r in rows]
    device = "cpu" if options.dry else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    report = {"device": device, **versions, "tests_passed": tests == 0, "figures": figures}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1))
    print(f"figures: {options.json}")
    return int(tests != 0)


def _run_tests(dry: bool) -> int:
    paths = _DRY_TESTS if dry else ("tests/gpu",)
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=8", "-m", "not soak", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TRITON_INTERPRET": str(int(dry))}
    return subprocess.run(command, cwd=_ROOT, env=environment).returncode


def _rows() -> Iterator["Row"]:
    import torch

    from inference.gpu_check import measurements as m
    from inference.gpu_check.random_model import LARGE, MEDIUM, SMALL

    bench = m.Bench(torch.device("cuda"), torch.bfloat16, 1.0, 1 << 31)
    copy = bench.copy_bandwidth()
    yield m.Row("copy of memory", copy / 1e9, "GB/s", note=torch.cuda.get_device_name())
    layouts = [(32, 8, 128), (32, 32, 128), (32, 8, 64), (9, 3, 64)]
    yield from m.attention(bench, copy, layouts=layouts, loads=[(1, 32768), (16, 4096), (16, 16384), (64, 4096)])
    yield from m.graph_gain(bench, SMALL, context=1024)
    for shape in (SMALL, MEDIUM, LARGE):
        yield from m.decode(bench, shape, batches=[16, 64, 256], context=1024, goal_at=64 if shape is LARGE else 0)
        torch.cuda.empty_cache()
    yield from m.prefill(bench, LARGE, tokens=8192)


def _dry_rows() -> Iterator["Row"]:
    import torch

    from inference.gpu_check import measurements as m
    from inference.gpu_check.random_model import TINY

    torch.set_num_threads(1)
    bench = m.Bench(torch.device("cpu"), torch.float32, 0.0, 1 << 20)
    copy = bench.copy_bandwidth()
    yield m.Row("copy of memory", copy / 1e9, "GB/s")
    yield from m.attention(bench, copy, layouts=[(4, 2, 16)], loads=[(2, 40)])
    yield from m.graph_gain(bench, TINY, context=8)
    yield from m.decode(bench, TINY, batches=[2], context=8, goal_at=0)
    yield from m.prefill(bench, TINY, tokens=5)


if __name__ == "__main__":
    sys.exit(main())
