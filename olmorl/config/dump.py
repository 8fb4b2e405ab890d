"""Write a Config as TOML, so that a run directory says exactly what ran.

The standard library reads TOML but does not write it; our sections hold only scalars, lists and
inline tables.
"""

import json
import re
from pathlib import Path

from olmorl.config.names import SECTIONS
from olmorl.config.schema import Config

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(config: Config) -> str:
    """Loading the text again gives an equal Config. TOML has no null: a key that is None stands in a comment."""
    blocks = []
    for section in SECTIONS:
        values = getattr(config, section).model_dump().items()
        lines = [f"# {key} = none" if value is None else f"{key} = {_format_top(value)}" for key, value in values]
        blocks.append("\n".join([f"[{section}]", *lines]) + "\n")
    return "\n".join(blocks)


def _format_top(value: object) -> str:
    """Several tables have a line each."""
    if isinstance(value, tuple | list) and len(value) > 1 and any(isinstance(item, dict) for item in value):
        return "".join(["[\n", *(f"  {_format(item)},\n" for item in value), "]"])
    return _format(value)


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # A JSON string is a TOML string, but for DEL, which TOML wants escaped too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        pairs = (f"{_format_key(key)} = {_format(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    assert isinstance(value, tuple | list), f"no TOML form for {value!r}"
    return f"[{', '.join(_format(item) for item in value)}]"


def _format_key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _format(key)
