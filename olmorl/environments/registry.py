"""The environments that ship, by name, and how a name or a path of one's own is read."""

import difflib

from olmorl.contract.errors import ConfigError

BUILTIN = {"calculator": "olmorl.environments.calculator:Calculator"}
"""by import path: they are imported in the processes that run them alone"""


def environment_path(name: str) -> str:
    """ "module:Class" for `name`. Raises ConfigError, naming the nearest."""
    if name in BUILTIN:
        return BUILTIN[name]
    module, colon, attribute = name.partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        return name
    close = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.4)
    hint = f" did you mean {close[0]!r}?" if close else ""
    known = ", ".join(BUILTIN)
    raise ConfigError(
        f"unknown environment {name!r};{hint} one of your own is given as my_module:MyClass; built in are {known}"
    )
