"""A TOML file and dotted overrides become one Config, or one readable ConfigError.

The file comes first, each override after it; what is said later wins. Within one file a key may be set once, also
through an alias.
"""

import logging
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from olmorl.config.explain import explain
from olmorl.config.names import ALIASES, FIELDS, SECTIONS, find_key
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    """dotted"""
    value: object
    where: str
    """the file or the override that said so"""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, lay `overrides` ("section.key=value") over it, check everything.

    A relative model.path, data.train or eval.data that exists is made absolute: seen from the current directory
    first, then from the config file's folder. What exists in neither stays as it is (it may be a hub id).
    """
    settings: dict[str, Setting] = {}
    if path is not None:
        settings.update(_read_file(Path(path)))
    for override in overrides:
        setting = _parse_override(override)
        settings[setting.key] = setting

    values: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for setting in settings.values():
        section, key = setting.key.split(".")
        values[section][key] = setting.value
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, {key: setting.where for key, setting in settings.items()})) from None
    folders = [Path()] if path is None else [Path(), Path(path).parent]
    return _resolve_paths(config, folders)


def _read_file(path: Path) -> dict[str, Setting]:
    where = str(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such config file") from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None

    settings: dict[str, Setting] = {}
    for name, value in _flatten(document):
        # An empty section says nothing, but its name must be known.
        if isinstance(value, dict) and not value and name not in FIELDS:
            if name not in SECTIONS:
                find_key(f"{name}.", where=where)
            continue
        setting = _make_setting(name, value, where)
        if setting.key in settings:
            raise ConfigError(f"{where}: {setting.key} is set twice, the second time as {name!r}; keep one")
        settings[setting.key] = setting
    return settings


def _flatten(document: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in document.items():
        if isinstance(value, dict) and value and prefix + name not in FIELDS:
            pairs += _flatten(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, value))
    return pairs


def _parse_override(text: str) -> Setting:
    where = f"override {text!r}"
    name, equals, raw = text.partition("=")
    name, raw = name.strip(), raw.strip()
    if not equals or not name:
        raise ConfigError(f"{where}: not of the form section.key=value, such as run.steps=10")
    key = find_key(name, where=where)
    return _make_setting(name, _parse_value(raw, FIELDS[key], where), where)


def _parse_value(raw: str, field: FieldInfo, where: str) -> object:
    """A TOML value, or else the bare text. Text fields take digits as text; "none" empties what may be empty."""
    kinds = get_args(field.annotation) or (field.annotation,)
    if raw.lower() in ("none", "null"):
        if NoneType in kinds:
            return None
        if field.default == ():
            return []
    if raw in ("True", "False"):
        return raw == "True"
    opens = raw[:1] in ("'", '"', "[", "{")
    if not opens and (str in kinds or Path in kinds) and Ellipsis not in kinds:
        return raw
    try:
        document = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError as error:
        if opens:
            raise ConfigError(f"{where}: the value is not valid TOML: {error}") from None
        return raw
    return document["value"] if len(document) == 1 else raw


def _make_setting(name: str, value: object, where: str) -> Setting:
    key = find_key(name, where=where)
    if name == "inflight_updates":
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: inflight_updates is {value!r}; it must be true or false")
        value = "inflight" if value else "drain"
    if name in ALIASES:
        log.warning("%s: %s is taken as %s = %r", where, name, key, value)
    return Setting(key, value, where)


def _resolve_paths(config: Config, folders: Sequence[Path]) -> Config:
    def resolve(text: str) -> str:
        for folder in folders:
            candidate = folder / os.path.expanduser(text)
            if os.path.exists(candidate):
                return os.path.abspath(candidate)
        return text

    model = config.model.model_copy(update={"path": resolve(config.model.path)})
    train, evaluation = (
        tuple(source.model_copy(update={"path": resolve(source.path)}) for source in sources)
        for sources in (config.data.train, config.eval.data)
    )
    data, held_out = (
        config.data.model_copy(update={"train": train}),
        config.eval.model_copy(update={"data": evaluation}),
    )
    return config.model_copy(update={"model": model, "data": data, "eval": held_out})
