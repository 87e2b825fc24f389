"""Writes the tables of docs/configuration.md from the schema: `python docs/configuration.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import generated_part

from jzero.config import keys
from jzero.config.aliases import DEPRECATED, RENAMED, is_autocast
from jzero.config.fields import kind_of
from jzero.config.screen import FIELDS, section_in
from jzero.config.sections import Settings
from jzero.optimizers import groups, lr_schedules, table


def generated() -> Iterator[str]:
    yield "## Honoured keys\n"
    yield (
        f'Numbers and flags in quotes (`"3"`, `"true"`) are read in {_names(sorted(keys.TAKES_QUOTES))}, which '
        "DeepSpeed reads with pydantic; pydantic takes them. Elsewhere they are an error.\n"
    )
    for section in _sections():
        yield from _fields_of(section)
    yield "## Optimizers\n"
    yield "The names are case-insensitive. `auto` is the default.\n"
    for name, optimizer in table.DEEPSPEED.items():
        yield from _params(name, optimizer.params)
    yield f"From optax, with optax's parameters: {_names((*table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER))}.\n"
    yield f"Refused: {_names(sorted(table.REFUSED))}.\n"
    yield from _params("A group of optimizer.groups", groups.KEYS)
    for keys_of, names in _by_group().items():
        yield f"{', '.join(f'`{key}`' for key in keys_of) or 'Nothing'}: {_names(names)}.\n"
    one = "In optax's optimizers, the weight decay of a group is the optimizer's or 0, or that of one group if the "
    yield one + "optimizer's is 0.\n"
    yield "## Schedulers\n"
    for name, schedule in lr_schedules._DEEPSPEED.items():
        yield from _params(name, schedule.params)
    yield f"From optax, with optax's parameters: {_names(lr_schedules.OPTAX_SCHEDULES)}.\n"
    yield "## Every key\n"
    yield from EVERY_KEY
    yield from _table(("key", "jzero", "values, replacement or reason"), sorted(_every_key()))


EVERY_KEY = (
    "The keys of DeepSpeed and of jzero, in alphabetical order.\n",
    "- **honoured**: a setting, described above.",
    "- **replaced**: has no meaning under XLA. It loads, and the run report names what does its work.",
    "- **refused**: would change the run. A value that turns it off loads; any other is an error with this text.",
    "- **detail**: loads with any value; only the switch of its section decides.",
    "- **ignored**: does nothing in DeepSpeed either, or starts a tool that is no part of training. It loads with a "
    "warning in the run report. So does a comment, a key that begins with `_`, `#`, `//` or `comment`.",
    "- **name**: another name of a key. Only one of the two can be given.\n",
)


def _every_key() -> Iterator[tuple[str, str, str]]:
    for key, field in FIELDS.items():
        if kind := kind_of(field):
            default = "required" if field.is_required() else f"default {_default(field)}"
            yield f"`{key}`", "honoured", f"{kind.allowed}; {default}"
    for key, row in keys.KEYS.items():
        if is_autocast(key):
            yield f"`{key}`", "replaced", "the `bf16` or `fp16` section, see [Auto](#auto)"
        else:
            yield (
                f"`{key}`",
                row.fate,
                f"{row.text} (allowed: {row.kind.allowed})" if row.kind and row.fate == "replaced" else row.text,
            )
    for name, key in {**RENAMED, **DEPRECATED}.items():
        if name not in keys.KEYS:
            yield f"`{name}`", "name", f"`{key}`"


def _by_group() -> dict[tuple[str, ...], list[str]]:
    """Map the keys that a group can set to the optimizers with these."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in (*table.DEEPSPEED, *table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER):
        row, *_ = table.look_up(SimpleNamespace(type=name, params={}))
        assert row is not None
        found.setdefault(row.by_group, []).append(name)
    return found


def _sections() -> Iterator[str]:
    yield ""
    yield from (path for path, field in FIELDS.items() if section_in(field))


def _fields_of(section: str) -> Iterator[str]:
    model = section_in(FIELDS[section]) if section else Settings
    assert model is not None
    rows = []
    for name in model.model_fields:
        path = f"{section}.{name}" if section else name
        if kind := kind_of(FIELDS[path]):
            rows.append((f"`{path}`", kind.allowed, _default(FIELDS[path])))
    if rows:
        yield f"### {section or 'Top level'}\n"
        yield (model.__doc__ or "").replace("\n    ", "\n").strip() + "\n"
        yield from _table(("key", "allowed", "default"), rows)


def _default(field: Any) -> str:
    return "required" if field.is_required() else _json(field.default)


def _json(value: Any) -> str:
    return f"`{json.dumps(value, default=repr)}`"


def _params(name: str, params: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    rows = (  # a required parameter's default is a bare object
        (f"`{key}`", param.kind.allowed, "required" if type(param.default) is object else _json(param.default))
        for key, param in params.items()
    )
    yield from _table(("parameter", "allowed", "default"), rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


if __name__ == "__main__":
    generated_part.write(__file__, generated())
