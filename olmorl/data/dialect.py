"""The column dialects of the field, read into one shape.

A dialect is recognised by the columns a row has. What a row says about its verifiers is kept as it stands; whether they
exist is for the rewards to say.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from olmorl.contract.errors import DataError
from olmorl.data.prompt import Check
from olmorl.data.rows import Row

Messages = tuple[dict[str, str], ...]

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
DIALECTS = (
    "messages | prompt, ground_truth, dataset (open-instruct)",
    "prompt, data_source, reward_model{ground_truth} (verl)",
    "prompt | question | problem | messages with answer | solution | ground_truth (TRL, GSM8K, MATH)",
)
_LACKING = {
    PROMPT_COLUMNS: f"are no known dialect; known are: {'; '.join(DIALECTS)}. Other names can be given as "
    "prompt_column and answer_column of the data source",
    ANSWER_COLUMNS: f"hold no answer to score completions by ({' | '.join(ANSWER_COLUMNS)}); one of another name can "
    "be given as answer_column of the data source, data.train={path = '...', answer_column = '...'}; where there is no "
    "config, as --answer-column",
}
GSM8K_ANSWER = re.compile(r"####\s*(\S.*?)\s*\Z")  # what GSM8K puts behind its worked solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What a data source says about columns of names of its own."""

    prompt: str | None = None
    answer: str | None = None
    lengths: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row, whatever its dialect."""

    prompt: str | Messages
    checks: tuple[Check, ...]
    data_source: str
    """names the row's rewards in the metrics"""
    environment: str | None = None
    lengths: tuple[int, ...] | None = None


def read_example(
    row: Row, *, place: str, source: str, columns: Columns | None = None, needs_answer: bool = True
) -> Example:
    """`source` names the data source of rows that name none. Without `needs_answer` the prompt alone is read, and no
    completion can be scored. Raises DataError."""
    columns = columns or Columns()
    if not needs_answer:
        return _check_text(_read_prompt_alone(row, place, source, columns), place)
    example = _check_text(_read_example(row, place, source, columns), place)
    if columns.lengths is not None:
        example = replace(example, lengths=_read_lengths(row, columns.lengths, place))
    return replace(example, environment=_read_name(row, "environment", place))


def _read_name(row: Row, column: str, place: str) -> str | None:
    name = row.get(column)
    if name is not None and not isinstance(name, str):
        raise DataError(f"{place}: {column} is {name!r:.80}; it must be a name")
    return name or None


def _check_text(example: Example, place: str) -> Example:
    r"""JSON can write half of a surrogate pair ("\ud83d"), which is no text to a tokenizer or a file."""
    messages = example.prompt if isinstance(example.prompt, tuple) else ({"content": example.prompt},)
    for text in (example.data_source, *(part for message in messages for part in message.values())):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: not UTF-8: {text[error.start : error.end]!r} in {text!r:.80}") from None
    return example


def _read_lengths(row: Row, column: str, place: str) -> tuple[int, ...]:
    lengths = row.get(column)
    if not isinstance(lengths, list) or not lengths or not all(isinstance(n, int) and n > 0 for n in lengths):
        raise DataError(f"{place}: {column} is {lengths!r:.80}; it must be a list of whole numbers above 0")
    return tuple(lengths)


def _read_example(row: Row, place: str, source: str, columns: Columns) -> Example:
    if columns.prompt is None and columns.answer is None:
        if "dataset" in row and ("messages" in row or ("prompt" in row and "ground_truth" in row)):
            return _read_open_instruct(row, place)
        if "prompt" in row and "reward_model" in row:
            return _read_verl(row, place)
    prompt_column = _find_column(row, columns.prompt, PROMPT_COLUMNS, place)
    answer_column = _find_column(row, columns.answer, ANSWER_COLUMNS, place)
    answer = _required(row, answer_column, place)
    if isinstance(answer, str) and (match := GSM8K_ANSWER.search(answer)):
        answer = match.group(1)
    named = row.get("data_source")
    return Example(
        prompt=_read_prompt(row[prompt_column], prompt_column, place),
        checks=_read_verifier(row.get("verifier"), answer, place),
        data_source=named if isinstance(named, str) and named else source,
    )


def assign_verifiers(checks: Sequence[Check], verifiers: Sequence[str], *, place: str) -> tuple[Check, ...]:
    """The same ground truths for other verifiers: one for all of them, or one for each. Raises DataError."""
    if len(checks) == 1:
        return tuple(Check(verifier, checks[0].ground_truth) for verifier in verifiers)
    if len(checks) == len(verifiers):
        return tuple(Check(v, check.ground_truth) for v, check in zip(verifiers, checks, strict=True))
    raise DataError(
        f"{place}: the row has {len(checks)} ground truths, but the verifiers are {', '.join(verifiers)}; "
        "name as many, or none"
    )


def _read_verifier(named: object, answer: object, place: str) -> tuple[Check, ...]:
    """Of the column `verifier`: none, one, or a list; the answer is then a list too, or the same for all."""
    if named is None or named == "":
        return (Check(None, answer),)
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{place}: verifier is {named!r:.80}; it must name a verifier, or several in a list")
    if len(names) == 1 or not isinstance(answer, list):
        return tuple(Check(name, answer) for name in names)
    if len(names) != len(answer):
        raise DataError(f"{place}: verifier names {len(names)} verifiers for {len(answer)} ground truths")
    return tuple(Check(name, truth) for name, truth in zip(names, answer, strict=True))


def _find_column(row: Row, wanted: str | None, known: tuple[str, ...], place: str) -> str:
    if wanted is not None:
        if wanted not in row:
            raise DataError(f"{place}: there is no column {wanted!r}; there are {', '.join(row) or '(none)'}")
        return wanted
    found = next((name for name in known if name in row), None)
    if found is None:
        raise DataError(f"{place}: the columns {', '.join(row) or '(none)'} {_LACKING[known]}")
    return found


def _read_prompt_alone(row: Row, place: str, source: str, columns: Columns) -> Example:
    in_open_instruct = columns.prompt is None and "messages" in row and "dataset" in row
    column = "messages" if in_open_instruct else _find_column(row, columns.prompt, PROMPT_COLUMNS, place)
    named = row.get("dataset") if in_open_instruct else row.get("data_source")
    return Example(
        prompt=_read_prompt(row[column], column, place),
        checks=(),
        data_source=named if isinstance(named, str) and named else source,
    )


def _read_open_instruct(row: Row, place: str) -> Example:
    """`dataset` names a verifier, or a list of them with a ground truth for each."""
    truth = _required(row, "ground_truth", place)
    names: Any = row["dataset"]
    if not isinstance(names, list | tuple):
        names, truths = [names], [truth]
    elif len(names) == 1 and not (isinstance(truth, list | tuple) and len(truth) == 1):
        truths = [truth]
    else:
        truths = list(truth) if isinstance(truth, list | tuple) else [truth]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{place}: dataset is {row['dataset']!r}; it must name a verifier, or several in a list")
    if len(names) != len(truths):
        raise DataError(f"{place}: dataset names {len(names)} verifiers for {len(truths)} ground truths")
    column = "messages" if "messages" in row else "prompt"  # OLMo 3's published sets have the latter
    return Example(
        prompt=_read_prompt(row[column], column, place),
        checks=tuple(Check(name, truth) for name, truth in zip(names, truths, strict=True)),
        data_source="+".join(names),
    )


def _read_verl(row: Row, place: str) -> Example:
    model = row["reward_model"]
    if not isinstance(model, dict):
        raise DataError(f"{place}: reward_model is {model!r}; it must be an object that has ground_truth")
    source = row.get("data_source")
    if not isinstance(source, str) or not source:
        raise DataError(f"{place}: data_source is {source!r}; it must be a name")
    return Example(
        prompt=_read_prompt(row["prompt"], "prompt", place),
        checks=(Check(source, _required(model, "ground_truth", f"{place}: reward_model")),),
        data_source=source,
    )


def _required(row: Row, column: str, place: str) -> object:
    value = row.get(column)
    if value is None:
        raise DataError(f"{place}: {column} is missing; without it no completion can be scored")
    return value


def _read_prompt(value: object, column: str, place: str) -> str | Messages:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: {column} is {value!r}; it must be text or a list of chat messages")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(
                f"{place}: {message!r} in {column} is no chat message; it needs role and content, both text"
            )
        messages.append({"role": message["role"], "content": message["content"]})
    if messages[-1]["role"] == "assistant":  # a reference answer; the model is to write its own
        messages.pop()
    if not messages:
        raise DataError(f"{place}: {column} holds nothing but an assistant's answer")
    return tuple(messages)
