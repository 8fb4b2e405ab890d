"""The first call of the CPU kernels compiles for minutes: it says so, once, and computes what later processes do."""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher
from transformers import LlamaConfig, LlamaForCausalLM

import inference.kernels
from inference.kernels import cpu_reduce

TINY = 1e-37  # what is smaller, float32 does not hold in full

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


_SCORES = """
import sys
from inference import LLM, SamplingParams
llm = LLM(sys.argv[1], threads=1)
prompts = [[(7 * i) % 11 + 1 for i in range(length)] for length in (5, 70, 200)]
sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=True)
for output in llm.generate(prompts, sampling):
    print([value.hex() for value in output.prompt_logprobs[1:] + output.samples[0].logprobs])
"""


@pytest.mark.soak  # compiles every kernel
def test_whoever_compiles_has_the_digits_of_those_who_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=192, intermediate_size=256, num_hidden_layers=8, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")

    def scores() -> str:
        ran = subprocess.run(
            [sys.executable, "-c", _SCORES, str(tmp_path / "model")],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")},
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout

    assert scores() == scores()


def test_no_kernel_leaves_roundings_to_the_compiler() -> None:
    """Which the test above sees where it makes a difference."""
    kernels = [
        kernel
        for module in pkgutil.iter_modules(inference.kernels.__path__, "inference.kernels.")
        if module.name.split(".")[-1].startswith("cpu_")
        for kernel in vars(importlib.import_module(module.name)).values()
        if isinstance(kernel, Dispatcher)
    ]
    assert len(kernels) > 40
    assert not [kernel for kernel in kernels if kernel.targetoptions.get("fastmath")]


@given(st.lists(st.floats(-100, 100, width=32), max_size=100))
def test_sums_and_the_highest(values: list[float]) -> None:
    x = np.array(values, np.float32)
    exact = x.astype(np.float64)
    assert cpu_reduce.highest(x) == max(exact, default=-np.inf)
    assert abs(cpu_reduce.sum_of(x) - exact.sum()) <= 1e-6 * abs(exact).sum() + TINY
    assert abs(cpu_reduce.sum_of_squares(x) - (exact**2).sum()) <= 1e-6 * (exact**2).sum() + TINY
    assert np.isnan(cpu_reduce.sum_of(np.append(x, np.float32(np.nan))))
