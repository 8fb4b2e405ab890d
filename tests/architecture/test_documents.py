"""What documents say of the code is true: names resolve, links lead somewhere, commands would start."""

import ast
import re
import shlex
from pathlib import Path

from olmorl.config.load import load_config

_REFERENCE = re.compile(r"([\w./-]+\.py):([A-Za-z_][\w.]*)")
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_COMMAND = re.compile(r"^olmorl train (.*)$", re.MULTILINE)


def defined_names(path: Path) -> set[str]:
    """Functions, classes and methods ("Class.method" and "method"), and module-level constants."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
            names |= {f"{node.name}.{member.name}" for member in members}
    assigned = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    assigned += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return names | {target.id for target in assigned if isinstance(target, ast.Name)}


def broken_references(text: str, root: Path) -> list[str]:
    broken = []
    for file, name in _REFERENCE.findall(text):
        path = root / file
        if not path.is_file():
            broken.append(f"{file}:{name} (no such file)")
        elif name.rstrip(".") not in defined_names(path):
            broken.append(f"{file}:{name} (no such name in it)")
    return broken


def test_the_check_itself(root: Path) -> None:
    text = (
        "`olmorl/metrics/bag.py:MetricBag.add`, olmorl/metrics/bag.py:drain. `olmorl/metrics/names.py:METRIC_NAMES` "
        "`olmorl/metrics/bag.py:gone` `olmorl/nowhere.py:main` path/file.py:function"
    )
    assert [line.split(" ")[0] for line in broken_references(text, root)] == [
        "olmorl/metrics/bag.py:gone",
        "olmorl/nowhere.py:main",
        "path/file.py:function",
    ]


def test_names_in_documents_resolve(documents: list[Path], root: Path) -> None:
    broken = {
        f"{document.relative_to(root)}: {reference}"
        for document in documents
        for reference in broken_references(document.read_text().replace("path/file.py:function", ""), root)
    }
    assert not broken


def test_links_lead_somewhere(documents: list[Path]) -> None:
    dead = [
        f"{document.name}: {target}"
        for document in documents
        for target in _LINK.findall(document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert not dead


def test_training_commands_in_documents_would_start(documents: list[Path], root: Path) -> None:
    commands = [line for document in documents for line in _COMMAND.findall(document.read_text())]
    assert commands
    for line in commands:
        config, *overrides = [word for word in shlex.split(line, comments=True) if not word.startswith("--")]
        load_config(root / config, overrides)


def test_every_config_parses(root: Path) -> None:
    files = sorted((root / "configs").rglob("*.toml"))
    assert files
    for file in files:
        load_config(file, [])
