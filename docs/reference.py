"""mkdocs hook: fills the config reference from the pydantic models, so that it cannot differ from them.

The page holds `<!-- config reference -->` where the tables go.
"""

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from olmorl.config.data_sections import EvalSource, SourceSection
from olmorl.config.names import ALIASES, SECTIONS
from olmorl.config.section import Section

MARK = "<!-- config reference -->"
_LIMITS = {annotated_types.Ge: "≥ ", annotated_types.Gt: "> ", annotated_types.Le: "≤ ", annotated_types.Lt: "< "}


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, config_reference()) if MARK in markdown else markdown


def config_reference() -> str:
    parts = [_table(f"[{name}]", section) for name, section in SECTIONS.items()]
    parts.append(_table("A data source", SourceSection))
    own = [name for name in EvalSource.model_fields if name not in SourceSection.model_fields]
    parts.append(_table("An evaluation source, besides the above", EvalSource, only=own))
    aliases = [f"| `{alias}` | `{key}` |" for alias, key in ALIASES.items()]
    parts.append("\n".join(["## Aliases", "", "| open-instruct's flag | key |", "|---|---|", *aliases]))
    return "\n\n".join(parts)


def _table(title: str, section: type[Section], only: list[str] | None = None) -> str:
    fields = {name: info for name, info in section.model_fields.items() if only is None or name in only}
    rows = [f"| `{name}` | {describe_type(info)} | {_default(info)} | {_help(info)} |" for name, info in fields.items()]
    return "\n".join([f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows])


def describe_type(info: FieldInfo) -> str:
    limits = [f"{sign}{getattr(rule, name)}" for rule in info.metadata for name, sign in _limits(rule)]
    return ", ".join([_name(info.annotation), *limits])


def _limits(rule: object) -> list[tuple[str, str]]:
    return [(kind.__name__.lower(), sign) for kind, sign in _LIMITS.items() if isinstance(rule, kind)]


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value!r}`".replace("'", '"') for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return " or ".join(_name(kind) for kind in kinds)
    if get_origin(annotation) is tuple:
        items = [kind for kind in get_args(annotation) if kind is not Ellipsis]
        return f"list of {_name(items[0])}" if len(set(items)) == 1 else f"[{', '.join(map(_name, items))}]"
    if get_origin(annotation) is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "data source"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "*required*"
    value = list(info.default) if isinstance(info.default, tuple) else info.default
    if value is None or value in ([], {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _help(info: FieldInfo) -> str:
    return re.sub(r"\s+", " ", (info.description or "").replace("|", "\\|")).strip()
