"""Prompts made by a program: the tasks of reasoning_gym, an optional package, judged by the task's own scorer."""

import difflib
from collections.abc import Iterator

from olmorl.config.data_sections import PROCEDURAL, SourceSection
from olmorl.contract.errors import ConfigError, DataError
from olmorl.data.rows import Row

DEFAULT_SIZE = 1000
VERIFIER = "reasoning_gym"
INSTRUCTION = "\nGive your final answer between <answer> and </answer>."


def make_rows(source: SourceSection) -> Iterator[tuple[str, Row]]:
    """Yield (place, row). The same options, seed among them, give the same rows. Raises DataError and ConfigError."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            f"data source {source.path!r} needs the package reasoning_gym: pip install 'olmorl[reasoning-gym]'"
        ) from None
    task = source.path.removeprefix(PROCEDURAL)
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(f"{source.path}: reasoning_gym has no task {task!r}{hint}")
    options = {"seed": 0, "size": source.limit or DEFAULT_SIZE, **source.options}
    try:
        entries = reasoning_gym.create_dataset(task, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{source.path}: the task refuses the options {options}: {error}") from None
    for number, entry in enumerate(entries, 1):
        row = {"prompt": entry["question"] + INSTRUCTION, "answer": entry, "verifier": VERIFIER, "data_source": task}
        yield f"{source.path}:row {number}", row
