"""The models that `jzero plan --model` names: those of `jzero.models.named`, or the user's own function."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, get_type_hints

import jax
import numpy as np
from pydantic import TypeAdapter, ValidationError

from jzero.adapters.from_flax import from_flax
from jzero.errors import ConfigError, in_a_line
from jzero.model import Model
from jzero.tree import PyTree
from jzero.values.parameters import did_you_mean

if TYPE_CHECKING:
    from jzero.models.named import FoundModel

Shapes = Callable[[int], PyTree]
RANK = 16  # of adapters


def named_model(
    name: str, sequence: int, changes: Sequence[str] = (), adapters: str | None = None, rank: int = RANK
) -> tuple[Model, Shapes]:
    """Return a model, and the function from the global batch size to the shapes of a batch.

    Args:
      name: as for `jzero.models.named.find_model`, or "package.module:function" of the user's own.
      sequence: tokens of a row.
      changes: of a shape's fields, as "num_layers=16".
      adapters: "lora", "qlora" (with the layers' matrices in NF4) or None; of the rank, as `jzero finetune` adds them.

    Raises:
      ConfigError: an unknown model, field or module, or a function that fails.
    """
    if sequence < 1:
        raise ConfigError(f"--seq {sequence}: must be positive")
    if is_function(name):
        for option in [f"--adapters {adapters}"] * bool(adapters) + [f"--set {change}" for change in changes]:
            raise ConfigError(f"{option}: changes a preset or a download only, not {name}")
        model, shapes = _call(name)
        return model, shapes or tokens(sequence)
    found = _changed_model(name, changes)
    if found.kind == "vit":
        raise ConfigError(f"--model {name}: is a vit, which has no tokens to plan; use package.module:function")
    if found.directory is None and 0 < (found.shape.max_positions or 0) < sequence:
        found = found._replace(shape=dataclasses.replace(found.shape, max_positions=sequence))
    if adapters:
        add = importlib.import_module("jzero.models.named").add_adapters
        found = found._replace(shape=add(name, found.shape, rank, "nf4" if adapters == "qlora" else None))
    return _made(found), tokens(sequence)


def model_alone(name: str) -> Model:
    """Return the model of a name for `named_model`, without a batch: one of images, too."""
    return _call(name)[0] if is_function(name) else _made(_changed_model(name, ()))


def _made(found: FoundModel) -> Model:
    return from_flax(lambda rngs: found.module(found.shape, rngs=rngs))


def about(name: str, changes: Sequence[str] = ()) -> str:
    """Return a line on a shape that has the layers of a published model and another vocabulary; "" for others."""
    return "" if is_function(name) else _changed_model(name, changes).note


def is_function(name: str) -> bool:
    """Return whether a name is that of the user's own function."""
    family, colon, _ = name.partition(":")
    return bool(colon) and family not in ("llama", "gpt2", "moe") and not os.path.isdir(name)


def _changed_model(name: str, changes: Sequence[str]) -> FoundModel:
    found = importlib.import_module("jzero.models.named").find_model(name)
    return found._replace(shape=_changed(found.shape, changes))


@contextlib.contextmanager
def of_the_model(name: str, sequence: int) -> Iterator[None]:
    """Name the model in an error that its loss raises on the planned batch."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        problem = f"--model {name}, --seq {sequence}: the loss fails on the planned batch: {in_a_line(error)}"
        raise ConfigError(
            f"{problem}; the function may return (model, shapes), with shapes(rows) of a batch"
        ) from error


def tokens(sequence: int) -> Shapes:
    """Make the function that returns the shapes of a batch of tokens."""

    def shapes(rows: int) -> PyTree:
        return {key: jax.ShapeDtypeStruct((rows, sequence), np.int32) for key in ("inputs", "labels")}

    return shapes


def _changed(shape: Any, changes: Sequence[str], prefix: str = "") -> Any:
    """Change fields together: one alone may contradict another's old value. `prefix` is the path to `shape`."""
    hints, models = get_type_hints(type(shape)), importlib.import_module("jzero.models.decoder_config")
    kinds = {name: hints[name] for name in models.field_choices(type(shape))}
    values: dict[str, Any] = {}
    inner: dict[str, list[str]] = {}
    for change in changes:
        path, _, text = change.partition("=")
        field, dot, part = path.partition(".")
        what = f"--set {prefix}{change}"
        if field not in kinds:
            hint = did_you_mean(field, kinds).removesuffix(".") or f"; choose one of {', '.join(kinds)}"
            raise ConfigError(f"{what}: not a field of {type(shape).__name__}{hint}")
        if not dot:
            values[field] = _value(what, kinds[field], text)
        elif dataclasses.is_dataclass(getattr(shape, field)):
            inner.setdefault(field, []).append(f"{part}={text}")
        else:
            raise ConfigError(f"{what}: {prefix}{field} is {getattr(shape, field)}, which has no fields")
    for field, parts in inner.items():
        values[field] = _changed(values.get(field, getattr(shape, field)), parts, f"{prefix}{field}.")
    try:
        return dataclasses.replace(shape, **values)
    except ValueError as error:
        raise ConfigError(f"--set {prefix}{' --set '.join(changes)}: {error}") from None


def _value(what: str, kind: Any, text: str) -> Any:
    """Read a number, a boolean, null or a plain text as a value of a field."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(value, float) and not isfinite(value):  # NaN, Infinity, 1e400
        value = text
    forms = [value, text] if isinstance(value, int | float | bool | str | None) else []
    problem = "must be a number, true, false, null or a word; change fields of fields one by one, as mixture.top_k=1"
    for form in forms:
        try:
            return TypeAdapter(kind).validate_json(json.dumps(form), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Input ") if form is forms[0] else problem
    raise ConfigError(f"{what}: {problem}")


def _call(name: str) -> tuple[Model, Shapes | None]:
    """Return the model that the user's function makes, and the function of its batch, if it returns one."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"--model {name}: must be package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(f"--model {name}: {in_a_line(error)}") from None
    return made if isinstance(made, tuple) else (made, None)
