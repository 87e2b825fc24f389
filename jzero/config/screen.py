"""Screening: removes the keys that are not fields from the dict, and words every rejection."""

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from jzero.config import ignored, keys
from jzero.config.autocast import translate
from jzero.config.fields import Section
from jzero.config.sections import Settings
from jzero.config.suggest import LISTED, names_inside, suggest
from jzero.errors import ConfigError, one_line
from jzero.values.kinds import as_json, closest
from jzero.values.masking import mask
from jzero.values.trainer import is_auto

MISSING: Any = object()
MOST_KEYS, MOST_LEVELS = 1000, 20


def check_extent(data: Mapping[str, Any]) -> None:
    """Refuse a config of very many keys or levels, or one that contains itself.

    Raises:
      ConfigError: names the limit.
    """
    level: list[Any] = [data]
    keys = 0
    for _ in range(MOST_LEVELS):
        if not (level := [node for node in level if isinstance(node, Mapping | list | tuple)]):
            return
        keys += sum(len(node) for node in level if isinstance(node, Mapping))
        if keys > MOST_KEYS:
            raise ConfigError(f"config: has more than {MOST_KEYS:,} keys; about 250 are known")
        level = [child for node in level for child in (node.values() if isinstance(node, Mapping) else node)]
    raise ConfigError(f"config: is nested deeper than {MOST_LEVELS} levels; known keys have up to seven")


def plain(node: Any, autos: list[str], path: str = "") -> Any:
    """Copy the config as dicts, without the keys whose value is "auto"; those go to `autos`.

    XLA options keep the word, which may be one of their values, and so do the parameters of the optimizer and the
    scheduler: what it means depends on their type.
    """
    if isinstance(node, Section):
        node = {key: getattr(node, key) for key in node.model_fields_set}
    if not isinstance(node, Mapping) or path == "compiler_options.":
        return node
    auto = {k for k, v in node.items() if is_auto(v) and _may_be_auto(f"{path}{k}")}
    autos += [keys.renamed(f"{path}{k}") for k in node if k in auto]
    dropped = set() if path in ("optimizer.params.", "scheduler.params.") else auto
    read = _unquoted if keys.renamed(path).split(".")[0] in keys.TAKES_QUOTES else lambda value: value
    return {one_line(str(k)): plain(read(v), autos, f"{path}{k}.") for k, v in node.items() if k not in dropped}


def _may_be_auto(path: str) -> bool:
    """Return whether "auto" has a meaning under this dotted key; a required one has no default."""
    key = keys.renamed(path)
    return (
        (key in KNOWN and not (key in FIELDS and FIELDS[key].is_required()))
        or path in ignored.IGNORED
        or path.startswith(("optimizer.params.", "scheduler.params."))
    )


def _unquoted(value: Any) -> Any:
    """Read a number or a flag that is written in quotes.

    >>> [_unquoted(value) for value in ("1", "5e8", "True", "cpu", 3)]
    [1, 500000000.0, True, 'cpu', 3]
    """
    if not isinstance(value, str) or len(value) > 40:
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for read in (int, float):
        try:
            return number if math.isfinite(number := read(value)) else value
        except ValueError:
            pass
    return value


def pop(data: Any, *sections_and_key: Any) -> Any:
    """Remove a key and return its value; MISSING if it is absent."""
    *sections, key = sections_and_key
    for section in sections:
        data = data.get(section) if isinstance(data, dict) else None
    return data.pop(key, MISSING) if isinstance(data, dict) else MISSING


def _get(data: Any, path: str) -> Any:
    for key in path.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of the model with its field."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, Section):
                yield from _fields(part, f"{prefix}{name}.")


FIELDS = dict(_fields(Settings))
_SWITCHES = (key for key in ignored.IGNORED if key.endswith(".enabled"))
KNOWN = dict.fromkeys((*FIELDS, *keys.REPLACED, *keys.REFUSED, *_SWITCHES))
# Sections that have only replaced or refused keys. Inner ones come first, so that an outer one is empty when its turn
# comes and whatever it still holds is unknown.
_FOREIGN_SECTIONS = sorted(
    {key.rsplit(".", depth)[0] for key in KNOWN for depth in range(1, key.count(".") + 1)} - set(FIELDS),
    key=lambda path: -path.count("."),
)


class Screened(NamedTuple):
    """What a config has beside valid fields; `strict`: whether an unknown key is a problem."""

    replaced: list[keys.Replaced]
    ignored: list[ignored.Ignored]
    problems: list[str]
    strict: bool


def screen(data: dict[str, Any], autos: Collection[str] = ()) -> Screened:
    """Remove the replaced, refused, ignored and old keys from `data`, which then holds keys for the sections alone.

    `autos` are the keys that were given as "auto".
    """
    found = Screened([], [], [], strict=data.get("strict", True) != 0)
    _drop_comments(data, "", found)
    if isinstance(stage := data.get("zero_optimization"), bool):
        data["zero_optimization"] = {"stage": int(stage)}
    _rename(data, found)
    moved, idle, wrong_casts = translate(data, autos)
    found.replaced.extend(moved)
    found.ignored.extend(idle)
    found.problems.extend(wrong_casts)
    for path, (kind, by) in keys.REPLACED.items():
        if (value := pop(data, *path.split("."))) is MISSING or value is None:
            continue
        try:
            kind(value)
            found.replaced.append(keys.Replaced(path, value, by))
        except ValueError as wrong:
            found.problems.append(f"{path} = {_shown(path, value)}: {wrong}; or leave it out (replaced by {by})")
    for path, why in ignored.IGNORED.items():
        value = pop(data, *path.split("."))
        nothing = value in (MISSING, None, {}) or (path.endswith(".enabled") and value in (False, 0))
        if not nothing:
            found.ignored.append(ignored.Ignored(path, value, why))
    refused: dict[str, list[str]] = {}
    for path, (off, text) in keys.REFUSED.items():
        if (value := pop(data, *path.split("."))) is not MISSING and value not in off:
            refused.setdefault(text, []).append(f"{path} = {_shown(path, value)}")
    found.problems.extend(f"{', '.join(settings)}: {text}" for text, settings in refused.items())
    for path in _FOREIGN_SECTIONS:
        section = pop(data, *path.split("."))
        if isinstance(section, dict):
            for key, value in section.items():
                _unknown(path, key, value, found)
        elif section not in (MISSING, None, False):
            found.problems.append(_no_section(path, section))
    return found


def _drop_comments(section: dict[str, Any], path: str, found: Screened) -> None:
    for key in [key for key in section if ignored.is_comment(key)]:
        found.ignored.append(ignored.Ignored(keys.dotted_key(path, key), section.pop(key), "a comment"))
    for key, value in section.items():
        if isinstance(value, dict) and key != "compiler_options":
            _drop_comments(value, keys.dotted_key(path, key), found)


def _rename(data: dict[str, Any], found: Screened) -> None:
    for other, key in keys.RENAMED.items():
        if (value := pop(data, *other.split("."))) is MISSING:
            continue
        if _get(data, key) is not None:
            found.problems.append(f"{other} = {_shown(other, value)}: is another name of {key}, also given; keep {key}")
            continue
        *sections, name = key.split(".")
        functools.reduce(dict.__getitem__, sections, data)[name] = value
    for old, new in keys.DEPRECATED.items():
        if (value := _get(data, old)) is not None and _get(data, new) is not None:
            found.problems.append(
                f"{old} = {_shown(old, value)}: is the deprecated name of {new}, also given; keep {new}"
            )
    for old, new in keys.OLD_OFFLOAD.items():
        value = pop(data, *old.split("."))
        if value is True:
            *sections, name = new.split(".")
            functools.reduce(dict.__getitem__, sections, data)[name] = {"device": "cpu"}
        elif value not in (MISSING, None, False):
            found.problems.append(
                f'{old} = {_shown(old, value)}: must be true or false; or write {new}: {{"device": "cpu"}}'
            )


def meant(path: str) -> set[str]:
    """Return the fields that an unknown key may stand for: those of its name elsewhere, and the nearest beside it.

    >>> meant("fp16.stage"), meant("optimizer.typ")
    ({'zero_optimization.stage'}, {'optimizer.type'})
    """
    section, _, key = path.rpartition(".")
    near = closest(key, names_inside(section, FIELDS), 0.65)
    same = {field for field in FIELDS if field.rpartition(".")[2] == key}
    return same | ({keys.dotted_key(section, near)} if near else set())


def explain(path: str, detail: Any, found: Screened) -> None:
    """Word one pydantic error: the key, its value, the allowed values and the fix."""
    *sections, key = detail["loc"]
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        return _unknown(".".join(sections), key, value, found)
    if detail["type"] == "missing":
        problem = f'{path}: required; write for example "{key}": {as_json(FIELDS[path].examples[0])}'
    elif detail["type"] == "value_error":
        default = "" if FIELDS[path].default is None else f" for the default {as_json(FIELDS[path].default)}"
        alternative = "" if FIELDS[path].is_required() else f"; or leave it out{default}"
        problem = f"{path} = {_shown(path, value)}: {detail['ctx']['error']}{alternative}"
    else:
        problem = _no_section(path, value)
    found.problems.append(problem)
    return None


def _unknown(section: str, key: str, value: Any, found: Screened) -> None:
    path, advice = keys.dotted_key(section, key), suggest(section, key, value, FIELDS, KNOWN)
    if found.strict:
        found.problems.append(f"{path} = {_shown(path, value)}: unknown key; {advice}")
    else:
        found.ignored.append(ignored.Ignored(path, value, f"unknown key; {advice}"))


def _no_section(path: str, value: Any) -> str:
    inside = names_inside(path, FIELDS) or names_inside(path, KNOWN)
    hint = f"; did you mean {as_json(meant)}?" if (meant := _section_for(value, inside)) else ""
    with_keys = f" with the keys {', '.join(inside)}" if len(inside) <= LISTED else ""
    return f"{path} = {_shown(path, value)}: must be a section {{...}}{with_keys}{hint}"


def _section_for(value: Any, inside: Collection[str]) -> dict[str, Any]:
    """Return the section that a flag or a word probably stands for, given the keys inside; {} if none does."""
    if not isinstance(value, bool | str):
        return {}
    device = "none" if value in (False, "none") else "cpu"
    meant = {"enabled" if isinstance(value, bool) else "type": value, "device": device}
    return next(({key: meant[key]} for key in meant if key in inside), {})


def _shown(key: str, value: Any) -> str:
    """Write a value as in the JSON file, masked under a secret's name."""
    return as_json(mask(key, value))
