"""pydantic's findings as lines a user can act on: field, value, where it was said, what is allowed."""

import difflib
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from olmorl.config.data_sections import EvalSource, SourceSection
from olmorl.config.names import FIELDS


def explain(error: ValidationError, wheres: Mapping[str, str]) -> str:
    """One line a field; `wheres` says for each dotted key which file or override set it."""
    lines: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors():
        lines.setdefault(_name(detail), []).append(detail)
    return "\n".join(_describe(name, details, wheres) for name, details in lines.items())


def _name(detail: ErrorDetails) -> str:
    """ "data.train[1]"; what pydantic appends for the branches of a union is left out."""
    parts = detail["loc"]
    if detail["type"] == "missing":  # of a list that is too short: the list is at fault
        parts = parts[:2]
    if detail["type"] == "extra_forbidden":  # only of a table inside a section; find_key has seen all others
        parts = parts[:-1]
    items = "".join(f"[{part}]" for part in parts[2:] if isinstance(part, int))
    inner = "".join(f".{part}" for part in parts[3:] if isinstance(part, str) and part in EvalSource.model_fields)
    return ".".join(str(part) for part in parts[:2]) + items + inner


def _describe(name: str, details: list[ErrorDetails], wheres: Mapping[str, str]) -> str:
    key = name.partition("[")[0]
    first = details[0]
    if first["type"] == "extra_forbidden":
        source = EvalSource if name.startswith("eval.") else SourceSection
        return f"{name} has {_nearest_of_source(str(first['loc'][-1]), list(source.model_fields))}"
    if first["type"] == "value_error":  # from a validator that looks at several fields: it says all itself
        return f"{f'[{name}] ' if name else ''}{first['msg'].removeprefix('Value error, ')}"
    text = FIELDS[key].description if key in FIELDS else None
    help_text = f" ({' '.join(text.split())})" if text else ""
    if first["type"] == "missing" and key not in wheres:
        return f"{name} is missing{help_text}"
    where = f" in {wheres[key]}" if key in wheres else ""
    allowed = " or ".join(_allowed(detail) for detail in details)
    return f"{name} is {first['input']!r}{where}; it must be {allowed}{help_text}"


def _nearest_of_source(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"its keys are {', '.join(known)}"
    return f"an unknown key {key!r}; {hint}"


def _allowed(detail: ErrorDetails) -> str:
    words = {
        "bool_type": "true or false",
        "int_type": "an integer",
        "float_type": "a number",
        "string_type": "a string",
        "tuple_type": "a list",
        "path_type": "a path",
        "missing": "longer",
        "too_short": "a list of one or more",
        "string_too_short": "a text of one character or more",
    }
    return words.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
