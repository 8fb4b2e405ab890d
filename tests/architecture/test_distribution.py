"""What is shipped: the wheel, and the versions it is tested with."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

import olmorl


def test_the_wheel_holds_three_packages_and_nothing_else(root: Path, sources: list[Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(root)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == f"olmorl-{olmorl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"olmorl-{olmorl.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"olmorl", "inference", "learner", info}
    assert {str(path.relative_to(root)) for path in sources} <= names
    assert f"{info}/licenses/LICENSE" in names and f"{info}/entry_points.txt" in names


def test_constraints_pin_every_direct_dependency_within_its_range(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    lines = (line.partition("#")[0].strip() for line in (root / "constraints.txt").read_text().splitlines())
    pins = dict(line.split("==") for line in lines if line)
    requirements = {r.name.lower(): r for r in map(Requirement, declared) if r.name != "olmorl"}
    assert set(pins) == set(requirements)
    assert not [name for name, pin in pins.items() if not requirements[name].specifier.contains(pin)]


def test_every_import_is_a_direct_dependency(root: Path, sources: list[Path]) -> None:
    """What is imported is declared, so that no transitive package goes missing one day."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for_users = [*project["dependencies"], *project["optional-dependencies"]["reasoning-gym"]]
    declared = {Requirement(text).name.replace("-", "_").lower() for text in for_users}
    ours = {"olmorl", "inference", "learner"}
    imported = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                imported.add(node.module.split(".")[0])
    with_pydantic = {"pydantic_core"}  # the other half of pydantic, in lock step with it
    assert imported - set(sys.stdlib_module_names) - ours - declared - with_pydantic == set()
