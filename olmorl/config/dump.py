"""Write a Config as TOML, so that a run directory says exactly what ran.

The standard library reads TOML but does not write it; our sections hold only scalars, lists and
inline tables.
"""

import json
from pathlib import Path

from olmorl.config.names import SECTIONS
from olmorl.config.schema import Config


def dump_toml(config: Config) -> str:
    """Loading the text again gives an equal Config. TOML has no null: a key that is None is left out."""
    blocks = []
    for section in SECTIONS:
        values = getattr(config, section).model_dump().items()
        lines = [f"{key} = {_format(value)}" for key, value in values if value is not None]
        blocks.append("\n".join([f"[{section}]", *lines]) + "\n")
    return "\n".join(blocks)


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # A JSON string is a TOML string, but for DEL, which TOML wants escaped too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        pairs = (f"{_format(key)} = {_format(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    assert isinstance(value, tuple | list), f"no TOML form for {value!r}"
    return f"[{', '.join(_format(item) for item in value)}]"
