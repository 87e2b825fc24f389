"""Screening: takes each key of a config by its row or its field, and words every rejection."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic.fields import FieldInfo

from jzero.config import keys
from jzero.config.aliases import rename, renamed, setting_text, translate
from jzero.config.fields import OR_NULL, Section, kind_of
from jzero.config.keys import KEYS, Ignored, Key, Replaced, dotted_key
from jzero.config.sections import Settings
from jzero.config.sizes import MICRO, TRAIN
from jzero.errors import ConfigError, one_line
from jzero.values.kinds import as_json, closest, either
from jzero.values.parameters import MICRO_BATCH, is_auto

MOST_KEYS, MOST_LEVELS = 1000, 20
Note = TypeVar("Note", Replaced, Ignored, str)


def _fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key of the model with its field."""
    for name, field_info in model.model_fields.items():
        yield prefix + name, field_info
        if inner := section_in(field_info):
            yield from _fields(inner, f"{prefix}{name}.")


def section_in(field_info: FieldInfo) -> type[Section] | None:
    """Return the class of a field that is a section; None for a value."""
    parts = (field_info.annotation, *get_args(field_info.annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


FIELDS = dict(_fields(Settings))
# The keys that mean something: of the ignored ones only switches do.
KNOWN = dict.fromkeys((*FIELDS, *(k for k, row in KEYS.items() if row.fate != "ignored" or k.endswith(".enabled"))))
# One row for each key: the class of a section, None for one without fields; the field of a setting; a key of `KEYS`.
_ROWS: dict[str, type[Section] | FieldInfo | Key | None] = {
    "": Settings,
    **{key.rsplit(".", depth)[0]: None for key in KNOWN for depth in range(1, key.count(".") + 1)},
    **{path: section_in(field_info) or field_info for path, field_info in FIELDS.items()},
    **KEYS,
}
_PARAMS = ("optimizer.params", "scheduler.params")


@dataclass
class Screened:
    """A config, screened.

    Attributes:
      data: its fields with good values, as the sections take them.
      strict: whether an unknown key is a problem.
      autos: the keys given as "auto".
      notes: the replaced and the ignored keys, and the problems as text.
      wrong: the keys with bad values, the unknown ones, and the fields that these may stand for.
      refused: what a key says that turns a feature on -> the keys that do, with their values.
    """

    data: dict[str, Any] = field(default_factory=dict)
    strict: bool = True
    autos: list[str] = field(default_factory=list)
    notes: list[Replaced | Ignored | str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def problem(self, path: str, text: str) -> None:
        """Note the problem of a key."""
        self.notes.append(text)
        self.wrong.add(path)

    def noted(self, kind: type[Note]) -> tuple[Note, ...]:
        """Return the notes of a kind."""
        return tuple(note for note in self.notes if isinstance(note, kind))


def screen(given: Mapping[str, Any]) -> Screened:
    """Take the keys of a config by their rows, and check the values of its fields.

    Raises:
      ConfigError: it is too large to be a config; other problems are in the result.
    """
    _check_extent(given)
    found = Screened()
    found.data = data = _plain(given, found)
    found.strict = data.get("strict", True) != 0
    if isinstance(stage := data.get("zero_optimization"), bool):
        data["zero_optimization"] = {"stage": int(stage)}
    if set(found.autos) & {TRAIN, MICRO} and not {TRAIN, MICRO} & set(data):
        data[MICRO] = MICRO_BATCH
        found.autos = list(dict.fromkeys([*found.autos, MICRO]))
    found.notes.extend(rename(data))
    found.notes.extend(translate(data, found.autos))
    _read_section("", data, found)
    found.notes.extend(f"{', '.join(settings)}: {text}" for text, settings in found.refused.items())
    found.notes.extend(Replaced(key, "auto", KEYS[key].text) for key in found.autos if keys.is_replaced(key))
    return found


# ---- the config as plain dicts --------------------------------------------------------------------------------------


def _check_extent(data: Mapping[str, Any]) -> None:
    """Refuse a config of very many keys or levels, or one that contains itself."""
    level: list[object] = [data]
    keys = 0
    for _ in range(MOST_LEVELS):
        if not (level := [node for node in level if isinstance(node, Mapping | list | tuple)]):
            return
        keys += sum(len(node) for node in level if isinstance(node, Mapping))
        if keys > MOST_KEYS:
            raise ConfigError(f"config: has more than {MOST_KEYS:,} keys; about 250 are known")
        level = [child for node in level for child in (node.values() if isinstance(node, Mapping) else node)]
    raise ConfigError(f"config: is nested deeper than {MOST_LEVELS} levels; known keys have up to seven")


def _plain(node: object, found: Screened, path: str = "") -> Any:
    """Copy the config as dicts, without comments and without the keys whose value is "auto".

    XLA options keep the word, which may be one of their values, and so do the parameters of the optimizer and the
    scheduler: what it means depends on their type.
    """
    if isinstance(node, Section):
        node = {key: getattr(node, key) for key in node.model_fields_set}
    if not isinstance(node, Mapping) or path == "compiler_options":
        return node
    in_quotes = renamed(path).split(".")[0] in keys.TAKES_QUOTES
    kept = {}
    for name, value in node.items():
        key = one_line(str(name))
        inside = dotted_key(path, key)
        is_open = is_auto(value) and _may_be_auto(inside)
        if is_open:
            found.autos.append(renamed(inside))
        if is_comment(key):
            found.notes.append(Ignored(inside, value, "a comment"))
        elif not is_open or path in _PARAMS:
            kept[key] = _unquoted(value) if in_quotes else value
    return {key: _plain(value, found, dotted_key(path, key)) for key, value in kept.items()}


def is_comment(key: str) -> bool:
    """Return whether a key is a comment: it begins like `_comment`, `//`, `# note` or `comment2`.

    >>> [is_comment(key) for key in ("_stage", "comments", "comment_1", "communication_data_type")]
    [True, True, True, False]
    """
    return bool(re.match(r"_|#|//|comments?(?![a-z])", key, re.IGNORECASE))


def _may_be_auto(path: str) -> bool:
    """Return whether "auto" has a meaning under this dotted key; a required one has no default."""
    key = renamed(path)
    is_required = key in FIELDS and FIELDS[key].is_required()
    return (key in KNOWN and not is_required) or path in KEYS or path.rpartition(".")[0] in _PARAMS


def _unquoted(value: object) -> object:
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


# ---- each key by its row --------------------------------------------------------------------------------------------


def _read_section(path: str, section: dict[str, Any], found: Screened) -> bool:
    """Leave the fields with good values in a section; return whether it has all that it needs."""
    for key, value in list(section.items()):
        if not _is_good(path, key, value, found):
            del section[key]
    required = [name for name in names_inside(path, FIELDS) if FIELDS[dotted_key(path, name)].is_required()]
    for name in (missing := [name for name in required if name not in section]):
        if (key := dotted_key(path, name)) not in found.wrong:  # else its own problem is enough
            example = as_json((FIELDS[key].examples or [None])[0])
            found.problem(key, f'{key}: required; write for example "{name}": {example}')
    return not missing


def _is_good(section: str, key: str, value: object, found: Screened) -> bool:
    """Return whether a key is a field with a good value; note everything else."""
    path, home = dotted_key(section, key), _ROWS[section]
    if not key or "." in key or path not in _ROWS:
        if isinstance(home, type) and home.model_config["extra"] == "allow":
            return True
        found.wrong |= {path, *meant(path)}
        advice = f"unknown key; {suggest(section, key, value)}"
        found.notes.append(f"{setting_text(path, value)}: {advice}" if found.strict else Ignored(path, value, advice))
    elif isinstance(row := _ROWS[path], Key):
        _take(path, value, row, found)
    elif isinstance(row, FieldInfo) and (kind := kind_of(row)):
        if isinstance(value, dict):  # a parameter of the optimizer may have a row
            for name in [name for name in value if f"{path}.{name}" in KEYS]:
                _take(f"{path}.{name}", value.pop(name), KEYS[f"{path}.{name}"], found)
        try:
            kind(value)
            return True
        except ValueError as wrong:
            default = "" if row.default is None else f" for the default {as_json(row.default)}"
            leave = "" if row.is_required() else f"; or leave it out{default}"
            found.problem(path, f"{setting_text(path, value)}: {wrong}{leave}")
    elif isinstance(value, dict):
        return _read_section(path, value, found) and row is not None
    elif not _asks_nothing(path, value):
        found.problem(path, _no_section(path, value))
    return False


def _asks_nothing(section: str, value: object) -> bool:
    """Return whether a value that is no object may stand for a section that is left out."""
    if not (row := FIELDS.get(section)):
        return value in (None, False)
    return value is None and (OR_NULL in row.metadata or NoneType in get_args(row.annotation))


def _take(path: str, value: object, row: Key, found: Screened) -> None:
    """Note a key that is no setting, by its fate; null asks for nothing."""
    if value is None:
        return
    try:
        if row.kind:
            row.kind(value)
    except ValueError as wrong:
        if row.fate == "refused":
            found.refused.setdefault(row.text, []).append(setting_text(path, value))
        else:
            found.notes.append(f"{setting_text(path, value)}: {wrong}; or leave it out (replaced by {row.text})")
        return
    if row.fate == "replaced":
        found.notes.append(Replaced(path, value, row.text))
    elif row.fate == "ignored" and value != {} and not (path.endswith(".enabled") and value in (False, 0)):
        found.notes.append(Ignored(path, value, row.text))


def meant(path: str) -> set[str]:
    """Return the fields that an unknown key may stand for: those of its name elsewhere, and the nearest beside it.

    >>> meant("fp16.stage"), meant("optimizer.typ")
    ({'zero_optimization.stage'}, {'optimizer.type'})
    """
    section, _, key = path.rpartition(".")
    near = closest(key, names_inside(section, FIELDS), 0.65)
    same = {other for other in FIELDS if other.rpartition(".")[2] == key}
    return same | ({dotted_key(section, near)} if near else set())


def _no_section(path: str, value: object) -> str:
    inside = names_inside(path, FIELDS) or names_inside(path, KNOWN)
    hint = f"; did you mean {as_json(meant)}?" if (meant := _section_for(value, inside)) else ""
    with_keys = f" with the keys {', '.join(inside)}" if len(inside) <= LISTED else ""
    return f"{setting_text(path, value)}: must be a section {{...}}{with_keys}{hint}"


def _section_for(value: object, inside: Collection[str]) -> dict[str, object]:
    """Return the section that a flag or a word probably stands for, given the keys inside; {} if none does."""
    if not isinstance(value, bool | str):
        return {}
    device = "none" if value in (False, "none") else "cpu"
    meant = {"enabled" if isinstance(value, bool) else "type": value, "device": device}
    return next(({key: meant[key]} for key in meant if key in inside), {})


# ---- advice for an unknown key: the section it belongs in, or the known key that resembles it ----------------------

# Parameters of an optimizer or schedule that users write one level too high.
_PARAMETERS = zip(_PARAMS, (keys.OPTIMIZER_PARAMS, keys.SCHEDULER_PARAMS), strict=True)
_ADVICE = {key: f"it belongs in {home}" for home, names in _PARAMETERS for key in names.split()}
_ADVICE["max_grad_norm"] = keys.CLIP
_ADVICE["learning_rate"] = "write it as optimizer.params.lr"
LISTED = 10  # names; more are a wall of text


def names_inside(section: str, dotted: Iterable[str]) -> list[str]:
    """List the names directly inside a section ("" is the top level) of dotted keys.

    >>> names_inside("fp16", ["fp16.enabled", "bf16.enabled"])
    ['enabled']
    """
    inside = f"{section}." if section else ""
    return sorted({k.removeprefix(inside).split(".")[0] for k in dotted if k.startswith(inside)})


def suggest(section: str, key: str, value: object) -> str:
    """Advise on an unknown key in a clause for the error message, most certain advice first.

    The cutoffs are similarity ratios of difflib: near-identical names in the same section beat a known home elsewhere,
    which beats a loose resemblance.

    >>> suggest("zero_optimization", "gradient_clipping", 1)
    'it belongs at the top level'
    """
    low, sections = key.lower(), {k.rpartition(".")[0] for k in KNOWN}

    def fits(known_key: str) -> bool:
        # a flag for a section with a device is offload_optimizer: true, in the wrong place
        return isinstance(value, dict) or known_key not in sections or f"{known_key}.device" in FIELDS

    def homes(dotted: Collection[str]) -> list[str]:
        return sorted({k.rpartition(".")[0] for k in dotted if k.rpartition(".")[2] == low and fits(k)})

    if dotted_key(section, key) in KNOWN:
        return "write its dots as nested sections"
    if close := closest(key, names_inside(section, KNOWN), 0.85):
        return f"did you mean {as_json(close)}?"
    if key in _ADVICE:
        return _ADVICE[key]
    places = homes(FIELDS) or homes(KNOWN)
    if "" in places:
        return "it belongs at the top level"
    if 0 < len(places) <= 3:
        return f"it belongs in {either(places)}"
    if close := closest(key, names_inside(section, KNOWN), 0.65):
        return f"did you mean {as_json(close)}?"
    here = names_inside(section, FIELDS) or names_inside(section, KNOWN)
    if len(here) <= LISTED:
        return f"the keys here are {', '.join(here)}"
    if close := closest(key, {k.rpartition(".")[2] for k in FIELDS if fits(k)}, 0.8):
        return f"did you mean {either(k for k in FIELDS if k.rpartition('.')[2] == close)}?"
    return 'no known key resembles it; docs/configuration.md lists all, and "strict": false makes this a warning'
