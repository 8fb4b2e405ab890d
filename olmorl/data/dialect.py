"""The column dialects of the field, read into one shape.

A dialect is recognised by the columns a row has. What a row says about its verifier is kept as it stands; whether
that verifier exists is for the rewards to say.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from olmorl.contract.errors import DataError
from olmorl.data.rows import Row

Messages = tuple[dict[str, str], ...]

PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
DIALECTS = (
    "messages, ground_truth, dataset (open-instruct)",
    "prompt, data_source, reward_model{ground_truth} (verl)",
    "prompt | question | problem with answer | solution (TRL, GSM8K, MATH)",
)
GSM8K_ANSWER = re.compile(r"####\s*(\S.*?)\s*\Z")  # what GSM8K puts behind its worked solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row, whatever its dialect."""

    prompt: str | Messages
    ground_truth: object
    data_source: str
    """names the row's rewards in the metrics"""
    verifier: str | None
    """None: the row names none"""


def read_example(row: Row, *, place: str, file: str | Path) -> Example:
    """`file` names the data source of rows that name none. Raises DataError."""
    if "messages" in row and "dataset" in row:
        return _read_open_instruct(row, place)
    if "prompt" in row and "reward_model" in row:
        return _read_verl(row, place)
    prompt_column = next((name for name in PROMPT_COLUMNS if name in row), None)
    answer_column = next((name for name in ANSWER_COLUMNS if name in row), None)
    if prompt_column is None or answer_column is None:
        raise DataError(
            f"{place}: the columns {', '.join(row) or '(none)'} are no known dialect; known are: " + "; ".join(DIALECTS)
        )
    answer = _required(row, answer_column, place)
    if isinstance(answer, str) and (match := GSM8K_ANSWER.search(answer)):
        answer = match.group(1)
    source = row.get("data_source")
    return Example(
        prompt=_read_prompt(row[prompt_column], prompt_column, place),
        ground_truth=answer,
        data_source=source if isinstance(source, str) and source else Path(file).stem,
        verifier=None,
    )


def _read_open_instruct(row: Row, place: str) -> Example:
    """`dataset` names the verifier; it and `ground_truth` may be lists of one."""
    truth, name = _required(row, "ground_truth", place), row["dataset"]
    if isinstance(name, list | tuple):
        if len(name) != 1:
            raise DataError(f"{place}: dataset is {name!r}; exactly one verifier a row is supported")
        if isinstance(truth, list | tuple) and len(truth) == 1:
            truth = truth[0]
        name = name[0]
    if not isinstance(name, str) or not name:
        raise DataError(f"{place}: dataset is {name!r}; it must name a verifier")
    prompt = _read_prompt(row["messages"], "messages", place)
    return Example(prompt=prompt, ground_truth=truth, data_source=name, verifier=name)


def _read_verl(row: Row, place: str) -> Example:
    model = row["reward_model"]
    if not isinstance(model, dict):
        raise DataError(f"{place}: reward_model is {model!r}; it must be an object that has ground_truth")
    source = row.get("data_source")
    if not isinstance(source, str) or not source:
        raise DataError(f"{place}: data_source is {source!r}; it must be a name")
    return Example(
        prompt=_read_prompt(row["prompt"], "prompt", place),
        ground_truth=_required(model, "ground_truth", f"{place}: reward_model"),
        data_source=source,
        verifier=source,
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
