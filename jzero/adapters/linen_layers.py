"""Finds the layers of a Linen module: submodules with numbered names, as layers_0, layers_1, or one of nn.scan."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
from flax import linen

from jzero._compat import trace_state
from jzero.adapters.cut import Arguments, handler
from jzero.adapters.layer_paths import Key, LayerFunction, LayerPaths, Layers, layer_axis
from jzero.adapters.linen_model import PARAMS, LinenModel, streams
from jzero.adapters.methods import Outcome
from jzero.errors import ConfigError, some_of
from jzero.tree import PyTree, differences, named


class LinenLayers(Layers):
    """The layers of a Linen module whose names are a path and a number, or which nn.scan stacked.

    Args:
      plain: the model without a stack.
      path: "layers" for layers_0, layers_1, ..., or for a scanned module of this name; "encoder.layers" for those in
        encoder.
    """

    def __init__(self, plain: LinenModel, path: str):
        self.path, self.name = path, type(plain.linen).__name__
        modules, shapes = _called(plain), jax.eval_shape(lambda: plain.init(jax.random.key(0)))
        keys = _numbered(modules, path, self.name)
        stacked = keys == [tuple(path.split("."))]
        layers, self.layer = [modules[key] for key in keys], modules[keys[0]]
        self._numbers: dict[Key, int | None] = dict(zip(keys, [None] if stacked else range(len(keys)), strict=True))
        length, parts = len(keys), [named(functools.reduce(operator.getitem, key, shapes)) for key in keys]
        if stacked:
            fix = 'name layers with numbers, or a module of nn.scan with variable_axes={"params": 0}'
            length = layer_axis(parts[0], f"stack = {path!r}: is one module", fix)
        self.places = LayerPaths(tuple(keys), length, stacked, tuple(plain.mutable))
        self._check_alike(layers, parts)

    def name_of(self, number: int) -> str:
        name = self.path.replace(".", "/")
        return f"{name}[{number}]" if self.places.stacked else f"{name}_{number}"

    def handing_over(self) -> AbstractContextManager[object]:
        scope, trace = ExitStack(), trace_state()

        def intercept(next_method: Callable, args: Any, kwargs: Any, context: Any) -> Any:
            handle, key = handler.get(), context.module.path
            ours = key in self._numbers and context.method_name == "__call__"
            # nn.scan also traces its body for constants, in a trace whose values mean nothing outside.
            if handle is None or not ours or trace != trace_state():
                return next_method(*args, **kwargs)
            return handle(self._numbers[key], (args, kwargs))

        scope.enter_context(linen.intercept_methods(intercept))
        scope.enter_context(super().handing_over())
        return scope

    def function(self, plain: LinenModel) -> LayerFunction:
        def call(weights: PyTree, rng: jax.Array | None, arguments: Arguments) -> Outcome:
            first, (args, kwargs) = self.places.keys[0], arguments
            values = {name: plain.constants.values[name] for name in plain.collections}
            if constant := [n for n, x in values.items() if functools.reduce(lambda t, k: t.get(k, {}), first, x)]:
                raise ConfigError(f"stack = {self.path!r}: the layers have constants ({constant[0]}): leave out stack=")
            params = dict(weights)
            state = {name: params.pop(name) for name in plain.mutable if name in params}
            with plain.batch_norm(training=rng is not None):
                output, new = self.layer.apply(
                    {PARAMS: params, **state}, *args, rngs=streams(rng), mutable=list(state), **kwargs
                )
            return output, dict(new)

        return call

    def advice(self, reason: str) -> str:
        name, layer, path, layers = self.name, type(self.layer).__name__, self.path, self.places.layers
        return f"""stack = {path!r}: the layers cannot be cut out of the loss of {name}: {reason}.
Or write the model in three parts, with Linen modules for the ends and for a layer:

    class {name}Model:
        def init(self, rng):
            keys = jax.random.split(rng, {layers} + 1)
            stack = jax.vmap(lambda key: {layer}(...).init(key, x)["params"])(keys[1:])
            return {{"ends": Ends(...).init(keys[0], batch)["params"], "stack": stack}}
        def prefix(self, ends, batch, rng):    # what the first layer gets
            return Ends(...).apply({{"params": ends}}, batch, method="prefix")
        def block(self, layer, x, rng):    # one layer
            return {layer}(...).apply({{"params": layer}}, x)
        def suffix(self, ends, x, batch, rng):    # the loss, from what the last layer returns
            return Ends(...).apply({{"params": ends}}, x, batch, method="suffix")
        def loss(self, params, batch, rng):
            return jzero.model.stack_loss(self, params, batch, rng)"""

    def _check_alike(self, layers: list[linen.Module], parts: list[dict[str, Any]]) -> None:
        first, shapes = layers[0], [{name: x.shape for name, x in part.items()} for part in parts]
        for number, layer in enumerate(layers):
            problem = next(iter(differences(shapes[number], shapes[0])), "") or _difference(first, layer)
            if problem:
                raise ConfigError(
                    f"stack = {self.path!r}: the layers differ: {self.name_of(number)}: {problem}, as in "
                    f"{self.name_of(0)}. One program runs all layers of a stack: leave out stack=, or give them "
                    "one structure"
                )


def _called(plain: LinenModel) -> dict[Key, linen.Module]:
    """Map the paths of all submodules that the loss calls to the submodules, without variables."""
    found: dict[Key, linen.Module] = {}

    def record(next_method: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__call__":
            found.setdefault(context.module.path, context.module.clone(parent=None, name=None))
        return next_method(*args, **kwargs)

    with linen.intercept_methods(record):
        jax.eval_shape(lambda: plain.init(jax.random.key(0)))
    return found


def _numbered(modules: dict[Key, linen.Module], path: str, name: str) -> list[Key]:
    """List the paths of the layers.

    Raises:
      ConfigError: fewer than two.
    """
    *parents, last = path.split(".")
    if (whole := (*parents, last)) in modules:
        return [whole]
    keys: list[Key] = []
    while (key := (*parents, f"{last}_{len(keys)}")) in modules:
        keys.append(key)
    if len(keys) < 2:
        depth = min((len(key) for key in modules if key and key[-1].endswith("_1")), default=0)
        known = [".".join(key).removesuffix("_1") for key in modules if len(key) == depth and key[-1].endswith("_1")]
        found = f"{name} has {len(keys)} submodules {path}_0, {path}_1, ... that its loss calls, must have at least 2"
        raise ConfigError(f"stack = {path!r}: {found}; numbered are {some_of(known) or 'none'}")
    return keys


def _difference(a: linen.Module, b: linen.Module) -> str:
    """Describe the first difference between two modules' fields."""
    if type(a) is not type(b):
        return f"is a {type(b).__name__}, not a {type(a).__name__}"
    for field in dataclasses.fields(a):
        mine, other = getattr(a, field.name), getattr(b, field.name)
        if field.name not in ("parent", "name") and mine != other:
            return f"{field.name} is {other!r}, not {mine!r}"
    return ""
