"""The house rules that a machine can hold."""

import ast
import re
from pathlib import Path

from olmorl.metrics.names import METRIC_NAMES, is_declared

MAX_LINES = 400
_NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}
_GROUPS = "|".join(sorted({name.split("/")[0] for name in METRIC_NAMES}))
_METRIC = re.compile(rf"(?:{_GROUPS})/[a-z0-9_/]+")


def test_every_file_has_a_noun(sources: list[Path]) -> None:
    assert not [path for path in sources if _NAMELESS & {path.stem, *path.parent.parts}]


def test_no_file_bursts(sources: list[Path]) -> None:
    assert not {str(path): n for path in sources if (n := len(path.read_text().splitlines())) > MAX_LINES}


def test_every_module_says_why_it_exists(sources: list[Path]) -> None:
    assert not [path for path in sources if ast.get_docstring(ast.parse(path.read_text())) is None]


def test_every_package_folder_is_a_package(sources: list[Path]) -> None:
    assert not {path.parent for path in sources if not (path.parent / "__init__.py").exists()}


def test_tests_hide_no_package(root: Path) -> None:
    """tests/inference/__init__.py would be imported in place of inference."""
    assert not list((root / "tests").rglob("__init__.py"))


def test_metric_names_are_declared(sources: list[Path]) -> None:
    written = {
        (node.value, path.name)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _METRIC.fullmatch(node.value)
    }
    assert len(written) > 20
    assert not {(name, file) for name, file in written if not is_declared(name)}
