"""The models that `jzero plan --model` names: presets, downloads, or the user's own by module and function."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, get_type_hints

import jax
import numpy as np
from pydantic import TypeAdapter, ValidationError

from jzero.adapters.from_flax import from_flax
from jzero.errors import ConfigError, in_a_line
from jzero.model import Model
from jzero.tree import PyTree
from jzero.values.parameters import did_you_mean

Shapes = Callable[[int], PyTree]
LLAMA3 = {"8b": "llama3-8b", "70b": "llama3-70b", "405b": "llama3.1-405b"}  # whose layers the presets have
GPT2 = {  # layers, width, heads, width of the MLP (Radford et al., 2019)
    "small": (12, 768, 12, 3072),
    "medium": (24, 1024, 16, 4096),
    "large": (36, 1280, 20, 5120),
    "xl": (48, 1600, 25, 6400),
}


def named_model(name: str, sequence: int, changes: Sequence[str] = ()) -> tuple[Model, Shapes]:
    """Return a model, and the function from the global batch size to the shapes of a batch.

    Args:
      name: "llama3-8b" and others of models/named.py, "llama:8b", "gpt2:xl", "moe:mixtral-8x7b", a directory with
        config.json, a download in the local cache, or "package.module:function".
      sequence: tokens of a row.
      changes: of a preset's fields, as "num_layers=16".

    Raises:
      ConfigError: an unknown preset, field or module, or a function that fails.
    """
    if sequence < 1:
        raise ConfigError(f"--seq {sequence}: must be positive")
    family, _, rest = name.partition(":")
    if family in ("llama", "gpt2", "moe"):
        return _preset(family, rest, sequence, changes), tokens(sequence)
    if not rest:
        return _published(name, changes), tokens(sequence)
    if changes:
        raise ConfigError(f"--set {changes[0]}: changes a preset or a download only, not {name}")
    made = _call(name)
    return made if isinstance(made, tuple) else (made, tokens(sequence))


def about(name: str, changes: Sequence[str] = ()) -> str:
    """Return a line on a preset that has the layers of a published model and another vocabulary; "" for others."""
    published = LLAMA3.get(name.removeprefix("llama:")) if name.startswith("llama:") else None
    if published is None or any(change.startswith("vocab_size=") for change in changes):
        return ""
    return f"{name} has the layers of {published}, and a vocabulary of 32,000 instead of 128,256"


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


def _preset(family: str, name: str, sequence: int, changes: Sequence[str]) -> Model:
    if family == "llama":
        llama = importlib.import_module("jzero.models.llama")
        shape, module = llama.preset(name), llama.Llama
    elif family == "moe":
        shape = importlib.import_module("jzero.models.mixtures").preset(name)
        module = importlib.import_module("jzero.models.decoder").Decoder
    elif name in GPT2:
        gpt2 = importlib.import_module("jzero.models.gpt2")
        shape = gpt2.GPT2Config(*GPT2[name], pad_vocab_to=128, max_positions=max(1024, sequence))
        module = gpt2.GPT2
    else:
        raise ConfigError(f"GPT-2 preset {name!r} is unknown; choose one of {', '.join(GPT2)}")
    shape = _changed(shape, changes)
    return from_flax(lambda rngs: module(shape, rngs=rngs))


def _published(name: str, changes: Sequence[str]) -> Model:
    """Return a model of models/named.py, of a directory with config.json, or of a download in the cache."""
    models, hub, downloads = (importlib.import_module(f"jzero.models.{part}") for part in ("named", "hub", "downloads"))
    kind = "llama"
    if downloads.from_cache(name).is_dir():
        shape = hub.config_from_hf(name)
        kind = shape.download.config["model_type"]
        if kind == "vit":
            raise ConfigError(f"--model {name}: is a vit, which has no tokens to plan; use package.module:function")
    elif name in models.MODELS:
        shape = models.named(name)
    else:
        fix = did_you_mean(name, models.MODELS)
        raise ConfigError(
            f"--model {name}: must be llama:PRESET, gpt2:PRESET, moe:PRESET, a directory with config.json, "
            f"package.module:function, or one of {', '.join(models.MODELS)}{fix}"
        )
    shape = _changed(shape, changes)
    return from_flax(lambda rngs: hub.MODELS[kind][0](shape, rngs=rngs))


def _changed(shape: Any, changes: Sequence[str], prefix: str = "") -> Any:
    """Change fields together: one alone may contradict another's old value. `prefix` is the path to `shape`."""
    hints = get_type_hints(type(shape))
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(shape) if field.compare}
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


def _call(name: str) -> Any:
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"--model {name}: must be package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)()
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(f"--model {name}: {in_a_line(error)}") from None
