"""The examples in docstrings and documents do what they say."""

import doctest
import importlib
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
