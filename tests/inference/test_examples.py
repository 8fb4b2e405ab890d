"""The examples in docstrings and documents do what they say."""

import ast
import doctest
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from inference import LLM, SamplingParams


@pytest.mark.parametrize("module", ["inference.llm", "inference.explain"])
def test_docstrings(module: str, model_folder: str) -> None:
    names = {"model": model_folder, "LLM": LLM, "SamplingParams": SamplingParams}
    result = doctest.testmod(importlib.import_module(module), extraglobs=names)
    assert result.attempted > 3 and result.failed == 0


def test_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    result = doctest.testfile(
        str(root / "docs" / "inference.md"), module_relative=False, optionflags=doctest.REPORT_NDIFF
    )
    assert result.attempted > 20 and result.failed == 0


def test_the_table_of_parameters_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()
    table = page.split("| `SamplingParams` | default | |\n|---|---|---|\n")[1].split("\n\n")[0]
    told = {}
    for row in table.splitlines():
        names, defaults, _ = row.strip("| ").split(" | ")
        told |= dict(zip(re.findall(r"`(\w+)`", names), ast.literal_eval(f"[{defaults}]"), strict=True))
    assert told == {field.name: field.default for field in fields(SamplingParams)}
