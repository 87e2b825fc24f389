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

ACCEPTED = "a path to a JSON or hjson file, a dict, a urlsafe-base64 string of JSON, or a Config"


def read(source: object) -> dict[str, Any]:
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
            return _parse(path.read_text(encoding="utf-8"), str(path))
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


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as pairs: a dict would keep the last of two equal keys without an error."""


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        tree = json.loads(text, object_pairs_hook=_Pairs)
    except ValueError as not_json:
        try:
            tree = hjson.loads(text, object_pairs_hook=_Pairs)
        except ValueError as not_hjson:
            both = f"as JSON: {not_json}; as hjson: {not_hjson}"
            raise ConfigError(f"{name}: is neither JSON nor hjson; {both}") from None
    if not isinstance(tree, _Pairs):
        raise ConfigError(f"{name} = {as_json(tree)}: must be a JSON object {{...}} of config keys")
    twice: list[str] = []
    data = _distinct(tree, "", twice)
    if twice:
        raise ConfigError(*[f"{key}: given twice in {name}; keep one of the two" for key in twice])
    return data


def _distinct(node: Any, path: str, twice: list[str]) -> Any:
    """Turn pairs into dicts; dotted keys that occur twice go to `twice`."""
    if isinstance(node, _Pairs):
        data: dict[str, Any] = {}
        for key, value in node:
            if key in data:
                twice.append(f"{path}{key}")
            data[key] = _distinct(value, f"{path}{key}.", twice)
        return data
    return [_distinct(item, path, twice) for item in node] if isinstance(node, list) else node
