"""What importing a module brings along, looked at in `sys.modules` of a fresh process.

import-linter sees only what is written; this sees what happens, through third parties too.
"""

import subprocess
import sys
from pathlib import Path

import pytest

# Says who imports a forbidden module, so that a failure names the chain.
_WATCHER = """
import sys, traceback
class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name in forbidden:
            traceback.print_stack()
sys.meta_path.insert(0, Watcher())
"""


def assert_brings_none(modules: list[str], forbidden: list[str], root: Path) -> None:
    imports = "\n".join(f"import {module}" for module in modules)
    script = f"forbidden = {forbidden!r}\n{_WATCHER}\n{imports}\nprint([m for m in forbidden if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]", f"{modules} bring {done.stdout}{done.stderr}"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_driver_has_no_torch(root: Path, sources: list[Path]) -> None:
    """Everything of olmorl, all at once, but for what is run as a process of its own."""
    own_process = (
        "olmorl.__main__",
        "olmorl.cli.node_probe",
        "olmorl.cli.torch_probe",
        "olmorl.quickstart.build",
        "olmorl.quickstart.__main__",
    )
    names = [module_name(path, root) for path in sources]
    driver = [n for n in names if n.split(".")[0] == "olmorl" and n not in own_process]
    assert len(driver) > 30
    assert_brings_none(driver, ["torch"], root)


@pytest.mark.parametrize(
    "module", ["inference.request", "inference.scheduler", "inference.block_allocator", "inference.prefix_cache"]
)
def test_engine_policy_runs_anywhere(module: str, root: Path) -> None:
    assert_brings_none([module], ["torch", "ray", "pydantic"], root)


def test_packing_runs_anywhere(root: Path) -> None:
    assert_brings_none(["learner.pack"], ["torch", "ray", "pydantic"], root)


def test_the_engine_needs_neither_ray_nor_pydantic(root: Path) -> None:
    assert_brings_none(["inference.llm"], ["ray", "pydantic", "olmorl.config", "learner"], root)


def test_a_gpu_box_needs_no_compiler_for_its_cpu(root: Path) -> None:
    """`make gpu-check` runs on torch, triton, transformers, numpy, safetensors and pytest alone."""
    ours = ["inference.llm", "inference.model.gpu_decoder", "inference.kernels.gpu_sampler", "inference.gpu_check"]
    assert_brings_none(ours, ["numba", "llvmlite", "ray", "pydantic", "scipy", "hypothesis"], root)


def test_a_gpu_box_sums_weights_without_xxhash(root: Path) -> None:
    script = (
        "import sys; sys.modules['xxhash'] = None\n"
        "import numpy as np, inference.llm, inference.gpu_check\n"
        "from olmorl.contract.weights import tensor_checksum\n"
        "one, other = np.zeros(8, np.uint8), np.arange(8, dtype=np.uint8)\n"
        "print(tensor_checksum(one) == tensor_checksum(one.copy()) != tensor_checksum(other))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.stdout == "True\n", done.stderr


def test_the_leaves_are_leaves(root: Path, sources: list[Path]) -> None:
    names = [module_name(path, root) for path in sources]
    heavy = ["torch", "ray", "transformers", "pyarrow", "wandb", "inference", "learner", "olmorl.controller"]
    assert_brings_none([n for n in names if n.startswith("olmorl.contract")], [*heavy, "pydantic"], root)
    assert_brings_none([n for n in names if n.startswith("olmorl.config")], heavy, root)


def test_help_loads_nothing_heavy(root: Path) -> None:
    assert_brings_none(["olmorl.cli.main"], ["torch", "ray", "pydantic", "numpy", "rich", "wandb", "pyarrow"], root)


def test_nothing_waits_with_wait_for(root: Path) -> None:
    """Python 3.11's asyncio.wait_for swallows a cancellation that meets the result: a loop is then never stopped."""
    found = [str(path) for path in (root / "olmorl").rglob("*.py") if "asyncio.wait_for(" in path.read_text()]
    assert not found, f"use asyncio.timeout() in {found}"
