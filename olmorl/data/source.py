"""One source of prompts: what its path stands for, and its rows as examples."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from olmorl.config.data_sections import PROCEDURAL, SourceSection
from olmorl.data.dialect import Columns, Example, assign_verifiers, read_example
from olmorl.data.hugging_face import read_hugging_face
from olmorl.data.procedural import make_rows
from olmorl.data.rows import SUFFIXES, Row, read_rows


def read_source(source: SourceSection, *, needs_answer: bool = True) -> Iterator[tuple[str, Example]]:
    """Yield (place, example); without `needs_answer` no answer is read. Raises DataError."""
    columns = Columns(prompt=source.prompt_column, answer=source.answer_column, lengths=source.lengths_column)
    for place, row in itertools.islice(_rows(source), source.limit):
        example = read_example(row, place=place, source=source_name(source), columns=columns, needs_answer=needs_answer)
        checks = example.checks
        if source.verifier is not None and needs_answer:
            checks = assign_verifiers(checks, source.verifier, place=place)
        name, environment = source.name or example.data_source, source.environment or example.environment
        yield place, replace(example, checks=checks, data_source=name, environment=environment)


def source_name(source: SourceSection) -> str:
    if source.name is not None:
        return source.name
    path = source.path.removeprefix(PROCEDURAL)
    name = Path(path).name if os.path.exists(path) else path
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def _rows(source: SourceSection) -> Iterator[tuple[str, Row]]:
    if source.path.startswith(PROCEDURAL):
        return make_rows(source)
    if os.path.isdir(source.path) or _may_be_hub_id(source.path):
        return read_hugging_face(source)
    return read_rows(source.path)


def _may_be_hub_id(path: str) -> bool:
    """owner/name, or a bare name; a file that is missing is not looked for on the hub."""
    parts = path.split("/")
    return (
        len(parts) <= 2
        and all(parts)
        and not parts[0].startswith((".", "~"))
        and not os.path.exists(path)
        and not path.endswith((*SUFFIXES, ".csv", ".txt", ".gz", ".zst"))
    )
