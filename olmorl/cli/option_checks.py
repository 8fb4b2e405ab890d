"""What the value of an option must be, where its type does not say it: known before anything is measured.

Callbacks of options: each gives back what it was given, or raises ConfigError.
"""

import math
import os
from pathlib import Path

import typer

from olmorl.contract.errors import ConfigError


def writable(path: Path | None) -> Path | None:
    """A file to write when all is done; its folder is made."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.filename}: {error.strerror}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is a folder" if path.is_dir() else "its place is read-only"
        raise ConfigError(f"{path} cannot be written: {why}")
    return path


def a_folder(path: Path) -> Path:
    """One to be made, or one that is there."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; give a folder")
    return path


def finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{value} is no number to measure or to count with; give one that is finite")
    return value


def slowdowns(pair: tuple[float, float]) -> tuple[float, float]:
    if not all(1 <= factor < math.inf for factor in pair):
        raise ConfigError(
            f"--sharing is {pair[0]:g} {pair[1]:g}; each takes 1 time as long beside the other, or longer"
        )
    return pair


def refuse_together(context: typer.Context, one: str, *others: str) -> None:
    """Raises ConfigError where one of `others` was given, which counts for nothing beside `one`."""
    sources = {parameter: context.get_parameter_source(parameter.name or "") for parameter in context.command.params}
    typed = [parameter for parameter, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    given = {option for parameter in typed for option in parameter.opts}
    if one in given and (idle := given & set(others)):
        raise ConfigError(f"{one if one.startswith('-') else one.upper()} makes nothing of {', '.join(sorted(idle))}")
