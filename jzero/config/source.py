"""Sources: reads a JSON or hjson file, a dict or a base64 string as one dict with distinct keys."""

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from jzero.errors import ConfigError
from jzero.values.kinds import as_json

LARGEST = 2**20  # characters of a file; configs have a few thousand
ACCEPTED = "a path to a JSON or hjson file, a dict, a urlsafe-base64 string of JSON, or a Config"


def read_config(source: object) -> dict[str, Any]:
    """Read the config as a dict, without checking its values.

    Raises:
      ConfigError: no such file, text that is neither JSON nor hjson, a key given twice.
    """
    if isinstance(source, Mapping):
        return {str(key): value for key, value in source.items()}
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"config = {as_json(source)}: must be {ACCEPTED}; got {type(source).__name__}")
    path = Path(source)
    name = as_json(str(path), 400)
    if os.path.isfile(path):
        try:
            with path.open(encoding="utf-8") as file:
                return _parse(file.read(LARGEST + 1), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config = {name}: cannot be read as text ({error})") from None
    if isinstance(source, str) and (text := _base64(source)):
        return _parse(text, "the base64 config")
    if isinstance(source, str) and source.lstrip().startswith("{"):
        raise ConfigError(f"config = {as_json(source)}: is JSON text, not a path; pass json.loads(text)")
    what = "is a directory" if os.path.isdir(path) else "no such file"
    raise ConfigError(f"config = {name}: {what}; must be {ACCEPTED}")


def _base64(source: str) -> str | None:
    """Decode a base64 string to the text of a JSON object; None if it is not one."""
    try:
        text = base64.b64decode(source + "=" * (-len(source) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def _load(text: str, name: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_Pairs)
    except ValueError as not_json:
        try:
            return hjson.loads(text, object_pairs_hook=_Pairs)
        except (ValueError, IndexError, OverflowError) as not_hjson:  # its faults: text without an end, 1e400
            both = f"as JSON: {not_json}; as hjson: {not_hjson}"
            raise ConfigError(f"{name}: is neither JSON nor hjson; {both}") from None


class _Pairs(list[tuple[str, object]]):
    """A JSON object as pairs: a dict would keep the last of two equal keys without an error."""


def _parse(text: str, name: str) -> dict[str, Any]:
    if len(text) > LARGEST:
        raise ConfigError(f"{name}: has more than {LARGEST:,} characters: too large for a config")
    twice: list[str] = []
    try:
        tree = _load(text, name)
        if not isinstance(tree, _Pairs):
            raise ConfigError(f"{name} = {as_json(tree)}: must be a JSON object {{...}} of config keys")
        data = _distinct(tree, "", twice)
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply; a config has up to seven levels of {{...}}") from None
    if twice:
        raise ConfigError(*[f"{key}: given twice in {name}; keep one of the two" for key in twice])
    return data


def _distinct(node: object, path: str, twice: list[str]) -> Any:
    """Turn pairs into dicts; dotted keys that occur twice go to `twice`."""
    if isinstance(node, _Pairs):
        data: dict[str, Any] = {}
        for key, value in node:
            if key in data:
                twice.append(f"{path}{key}")
            data[key] = _distinct(value, f"{path}{key}.", twice)
        return data
    return [_distinct(item, path, twice) for item in node] if isinstance(node, list) else node
