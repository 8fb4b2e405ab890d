"""The examples in docstrings do what they say."""

import doctest
import importlib

import pytest

from inference import LLM, SamplingParams


@pytest.mark.parametrize("module", ["inference.llm", "inference.explain"])
def test_docstrings(module: str, model_folder: str) -> None:
    names = {"model": model_folder, "LLM": LLM, "SamplingParams": SamplingParams}
    result = doctest.testmod(importlib.import_module(module), extraglobs=names)
    assert result.attempted > 3 and result.failed == 0
