"""What documents say of the code is true: names resolve, links lead somewhere, commands would start."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from olmorl.cli.main import app
from olmorl.config.data_sections import EvalSource, SourceSection
from olmorl.config.load import load_config
from olmorl.config.names import ALIASES, FIELDS, SECTIONS
from olmorl.metrics.names import METRIC_NAMES, is_declared
from olmorl.rewards import score

_REFERENCE = re.compile(r"([\w./-]+\.py):([A-Za-z_][\w.]*)")
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_COMMAND = re.compile(r"^(?:\.venv/bin/)?olmorl (.*)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_FIELDS_OF_SOURCES = {*SourceSection.model_fields, *EvalSource.model_fields}
_PARTS = {name.rpartition("/")[0] for name in METRIC_NAMES}
_METRIC_GROUPS = {name.split("/")[0] for name in METRIC_NAMES}


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


def commands(text: str) -> Iterator[list[str]]:
    for language, block in _BLOCK.findall(text):
        if language == "sh":
            lines = _COMMAND.findall(block.replace("\\\n", " "))
            yield from (shlex.split(line, comments=True) for line in lines)


def test_commands_in_documents_are_parsed(documents: list[Path], root: Path) -> None:
    """By the program itself, which is then not run; of training the config is read, too."""
    group = typer.main.get_command(app)
    seen = set()
    for document in documents:
        for words in commands(document.read_text()):
            command, name = group, "olmorl"
            while hasattr(command, "commands"):
                name, *words = words
                assert name in command.commands, f"{document.name}: there is no olmorl {name}"
                command = command.commands[name]
            context = command.make_context(name, list(words))
            seen.add(name)
            if name == "train":
                load_config(root / context.params["config"], context.params["overrides"] or [])
    assert {"train", "eval", "inspect", "dashboard", "doctor", "engine", "learner"} <= seen


def test_make_targets_in_documents_exist(documents: list[Path], root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for document in documents
        for language, block in _BLOCK.findall(document.read_text())
        if language == "sh"
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)
    }
    assert named and named <= targets


def test_config_keys_in_documents_exist(documents: list[Path]) -> None:
    unknown = []
    for document in documents:
        for code in _CODE.findall(document.read_text()):
            for section, key in re.findall(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.([a-z_]+)(?![\w./(-])", code):
                if f"{section}.{key}" not in FIELDS and key not in ("py", "md", "toml", "json", "jsonl"):
                    unknown.append(f"{document.name}: {section}.{key}")
    assert not [line for line in unknown if not line.startswith(("CHANGELOG", "from_verl", "LOG"))]


def test_metric_names_in_documents_are_declared(documents: list[Path]) -> None:
    unknown = []
    for document in documents:
        text = re.sub(r"^(\| there \|.*\n)((?:\|.*\n)*)", _right_column, document.read_text(), flags=re.MULTILINE)
        for code in _CODE.findall(text):
            if code.split("/")[0] in _METRIC_GROUPS and re.fullmatch(r"[a-z_]+(/[a-z0-9_<>]+)+", code):
                unknown += (
                    []
                    if is_declared(code) or code in _PARTS or (document.parent / code).exists()
                    else [f"{document.name}: {code}"]
                )
    assert not unknown


def _right_column(table: re.Match[str]) -> str:
    """Of a table that translates: the other system's names are its own."""
    return "\n".join(line.split("|")[2] for line in table.group().splitlines()) + "\n"


def test_every_metric_is_described(root: Path) -> None:
    described = set(_CODE.findall((root / "docs" / "metrics.md").read_text()))
    assert not [name for name in METRIC_NAMES if name not in described]


def test_toml_in_documents_is_a_config(documents: list[Path], tmp_path: Path) -> None:
    seen = 0
    for document in documents:
        for language, block in _BLOCK.findall(document.read_text()):
            if language == "toml":
                file, seen = tmp_path / f"{seen}.toml", seen + 1
                given = tomllib.loads(block)
                file.write_text(block)
                needed = [] if "train" in given.get("data", {}) else ["data.train=x.jsonl"]
                load_config(file, [*needed, *([] if "model" in given else ["model.path=m"])])
    assert seen >= 4


def test_flags_of_open_instruct_lead_to_keys(root: Path) -> None:
    """What the page says of an accepted flag is what becomes of it."""
    rows = re.findall(r"^\| (`.*) \| (`.*)$", (root / "docs" / "from_open_instruct.md").read_text(), re.MULTILINE)
    told = {flag: key for left, right in rows for flag, key in zip(_CODE.findall(left), _CODE.findall(right))}  # noqa: B905
    assert {flag: told.get(flag) for flag in ALIASES} == ALIASES


def test_python_in_documents_compiles(documents: list[Path]) -> None:
    blocks = [block for d in documents for language, block in _BLOCK.findall(d.read_text()) if language == "python"]
    assert len(blocks) > 5
    for block in blocks:
        if not block.startswith(">>>"):  # a session, which a test of its own plays
            ast.parse(block)


def test_the_verifiers_of_the_guide_work(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        block for language, block in _BLOCK.findall((root / "docs/verifier.md").read_text()) if language == "python"
    ]
    (tmp_path / "my_rewards.py").write_text(blocks[0])
    monkeypatch.chdir(tmp_path)
    verdict = score("my_rewards:near_sum", completion="6+9=15;15", ground_truth="16")
    assert "# scored 0.5" in blocks[1] and (verdict.status, verdict.reward) == ("scored", 0.5)
    guide: dict[str, Any] = {}
    exec(blocks[2], guide)
    in_range = guide["InRange"]()
    assert in_range("", [1, 3], None, num_tokens=2).reward == 1 and in_range("", [3, 4], None, num_tokens=2).reward == 0
    assert in_range("", "16", None, num_tokens=2).status == "unscorable"


def test_the_config_reference_has_every_key(root: Path) -> None:
    scope: dict[str, object] = {}
    exec((root / "docs" / "reference.py").read_text(), scope)
    page = scope["on_page_markdown"]((root / "docs" / "config.md").read_text())  # type: ignore[operator]
    for name in SECTIONS:
        section = page.split(f"## [{name}]\n")[1].split("\n## ")[0]
        assert [f"| `{key}` |" for key in SECTIONS[name].model_fields if f"| `{key}` |" not in section] == []
    assert all(f"| `{key}` |" in page for key in _FIELDS_OF_SOURCES)
    assert '| `batching` | `"continuous"` or `"static"` | `continuous` |' in page
    assert "| `path` | text | *required* |" in page and "integer, ≥ 1" in page


def test_every_config_parses(root: Path) -> None:
    files = sorted((root / "configs").rglob("*.toml"))
    assert files
    for file in files:
        load_config(file, [])
