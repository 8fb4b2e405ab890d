"""The CPU kernels compile for each kind of processor; which of them this one is must not decide what is found here."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from inference.kernels import cpu_decoder
from inference.llm import LLM
from olmorl.contract.generation import SamplingParams

_AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+lzcnt,+sse4.2"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"
KINDS = {
    "haswell": _AVX2,
    "alderlake": f"{_AVX2},+avxvnni",
    "skylake-avx512": _AVX512,
    "znver4": f"{_AVX512},+avx512vnni",
    "sapphirerapids": f"{_AVX512},+avx512vnni,+avxvnni",
}

_COMPILE = """
import pickle, sys
from inference.kernels import cpu_decoder, cpu_dot, cpu_tile
for name, signatures in pickle.load(open(sys.argv[1], "rb")).items():
    for signature in signatures:
        getattr(cpu_decoder, name).compile(signature)
print(cpu_tile.WIDE, cpu_dot.WIDE, cpu_dot.DOT)
"""


@pytest.fixture(scope="module")
def signatures(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what an engine calls: the types of the arguments."""
    for options in ({}, {"quantization": "int8", "quantize_head": True}, {"kv_cache_dtype": "int8"}):
        llm = LLM(model_folder, max_num_seqs=2, kv_cache_tokens=128, **options)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    called = {name: getattr(cpu_decoder, name).signatures for name in ("forward", "head")}
    assert all(called.values())
    file = tmp_path_factory.mktemp("signatures") / "signatures"
    file.write_bytes(pickle.dumps(called))
    return file


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compile_for_each_kind_of_processor(kind: str, signatures: Path, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "NUMBA_CPU_NAME": kind,
        "NUMBA_CPU_FEATURES": KINDS[kind],
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", _COMPILE, str(signatures)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    wide, dot_wide, dot = map(int, ran.stdout.split())
    assert (wide == 16, dot_wide == 16, dot == 1) == (
        "avx512f" in KINDS[kind], "avx512vnni" in KINDS[kind], "vnni" in KINDS[kind],
    )  # fmt: skip
