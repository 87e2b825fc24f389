"""Finds the layers of an NNX module: an nnx.List, numbered attributes, or one module stacked by nnx.vmap."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from typing import Any

import jax
import numpy as np
from flax import nnx

from jzero.adapters.cut import Arguments, handler
from jzero.adapters.layer_paths import Key, LayerFunction, LayerPaths, Layers, layer_axis
from jzero.adapters.methods import Outcome
from jzero.adapters.nnx_model import VALUES, Apply, Build, NNXModel, abstract_module, part_name, variables, with_call
from jzero.errors import ConfigError, some_of
from jzero.tree import PyTree, differences

LISTS = (nnx.List, list, tuple)


class NNXLayers(Layers):
    """The layers at a path of an NNX module.

    Args:
      build: builds the module.
      path: of the layers, as "layers" or "encoder.layers".

    Attributes:
      build: builds the module with layers that give their calls to `cut.handler`.
      abstract: the module, without values.
    """

    def __init__(self, build: Build, path: str):
        plain = abstract_module(build)
        keys, layers, stacked = _find(plain, path)
        _check_alike(plain, path, keys, layers, stacked)
        self.path, self.name = path, type(plain).__name__

        def handing_over(rngs: nnx.Rngs) -> nnx.Module:
            module = build(rngs)
            for number, layer in enumerate(_find(module, path)[1]):
                cls = _handing_over(type(layer), None if stacked else number)
                object.__setattr__(layer, "__class__", cls)  # nnx.Module.__setattr__ takes only state
            return module

        self.build, self.abstract = handing_over, abstract_module(handing_over)
        length = jax.tree.leaves(nnx.state(layers[0], nnx.Param))[0].shape[0] if stacked else len(layers)
        self.places = LayerPaths(tuple(keys), length, stacked)

    def function(self, plain: NNXModel) -> LayerFunction:
        layer, whole, places = _find(self.abstract, self.path)[1][0], plain.apply, self.places
        apply = Apply(layer, whole.constants, places.keys, places.stacked, sync_batch_norm=whole.sync_batch_norm)

        def call(weights: PyTree, rng: jax.Array | None, arguments: Arguments) -> Outcome:
            args, kwargs = arguments
            return apply.run(weights, rng, lambda module: module(*args, **kwargs))

        return call

    def advice(self, reason: str) -> str:
        name, path = self.name, self.path
        return f"""stack = {path!r}: the layers cannot be cut out of the loss of {name}: {reason}.
Or write what comes before and after the layers as methods, and pass from_flax({name}, stack={path!r}) no loss_fn:

    class {name}(nnx.Module):
        def prefix(self, batch):    # what the first layer gets
            return x
        def suffix(self, x, batch):    # the loss, from what the last layer returns; every layer runs x = layer(x)
            return loss"""


@functools.cache
def _handing_over(cls: type, number: int | None) -> type:
    """Make a class like `cls` whose calls go to the handler, while there is one."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = handler.get()
        return cls.__call__(self, *args, **kwargs) if handle is None else handle(number, (args, kwargs))

    return with_call(cls, call)


def _find(module: nnx.Module, path: str) -> tuple[list[Key], list[nnx.Module], bool]:
    """Return the keys of the layers, the layers, and whether they are one stacked module.

    Raises:
      ConfigError: there is nothing at the path, or no layers.
    """
    key: Key = ()
    found: Any = module
    for part in path.split("."):
        parent, step = found, int(part) if isinstance(found, LISTS) and part.isdecimal() else part
        if isinstance(step, int):
            found = parent[step] if step < len(parent) else None
        else:
            found = getattr(parent, part, None)
        key += (step,)
    if found is None and (names := _numbered(parent, part)):
        return [(*key[:-1], name) for name in names], [getattr(parent, name) for name in names], False
    if isinstance(found, nnx.Sequential):
        found, key = found.layers, (*key, "layers")
    if isinstance(found, nnx.Module) and not isinstance(found, nnx.List):
        return [key], [found], True
    if not isinstance(found, LISTS):
        raise _unknown(module, path)
    if others := [layer for layer in found if not isinstance(layer, nnx.Module)]:
        raise ConfigError(f"stack = {path!r}: {others[0]!r} is no nnx.Module; all layers must be modules of one class")
    return [(*key, i) for i in range(len(found))], list(found), False


def _numbered(node: object, name: str) -> list[str]:
    """List the attributes name_0, name_1, ..., or else name0, name1, ..."""
    for separator in ("_", ""):
        if found := list(takewhile(partial(hasattr, node), (f"{name}{separator}{i}" for i in count()))):
            return found
    return []


def _unknown(module: nnx.Module, path: str) -> ConfigError:
    """Make the error about a path, with those that would do."""
    known = []
    for where, node in nnx.iter_modules(module):
        if isinstance(node, nnx.List) and len(node) > 1 and isinstance(node[0], nnx.Module):
            known.append(f"{part_name(where)!r} ({len(node)} x {type(node[0]).__name__})")
    names = some_of(sorted(name for name, _ in nnx.iter_children(module)))
    do = f"the lists of modules are {some_of(known)}" if known else f"it has no list of modules, only {names}"
    return ConfigError(f"stack = {path!r}: {type(module).__name__} has no layers there; {do}")


def _check_alike(
    module: nnx.Module, path: str, keys: Sequence[Key], layers: Sequence[nnx.Module], stacked: bool
) -> None:
    """Raise a ConfigError unless the layers are equal, and share nothing with other parts of the module."""
    what = f"stack = {path!r}"
    if not stacked and len(layers) < 2:
        raise ConfigError(f"{what}: has {len(layers)} layers, must have at least 2: leave out stack=")
    leaves = variables(layers[0], nnx.Param)
    if not leaves:
        raise ConfigError(f"{what}: {type(layers[0]).__name__} has no parameters: leave out stack=")
    if stacked:
        fix = "name an nnx.List, or a module whose layers nnx.vmap stacked"
        layer_axis(leaves, f"{what}: is one {type(layers[0]).__name__}", fix)
    whole, names = variables(module), ["/".join(map(str, key)) for key in keys]
    for name, layer in zip(names, layers, strict=True):
        if problem := _difference(layers[0], layer, names[0], name):
            raise ConfigError(
                f"{what}: the layers differ: {problem}. One program runs all layers of a stack: leave out stack=, or "
                "give them one structure and move what differs into a parameter"
            )
    for name, layer in zip(names, layers, strict=True):
        if shared := [own for own in variables(layer, VALUES) if f"{name}/{own}" not in whole]:
            raise ConfigError(
                f"{what}: {name}/{shared[0]} is also a variable of another part of the module: the layers of a stack "
                "share no variables; leave out stack="
            )


def _difference(a: nnx.Module, b: nnx.Module, name_a: str, name_b: str) -> str | None:
    """Describe the first difference between two modules: a class, a variable's shape, a hyperparameter; None: none."""
    if type(a) is not type(b):
        return f"{name_b} is a {type(b).__name__}, {name_a} a {type(a).__name__}"
    mine, others = (
        {f"{name_b}/{name}": tuple(x.shape) for name, x in variables(module, VALUES).items()} for module in (a, b)
    )
    if problems := differences(others, mine):
        return f"{problems[0]} as in {name_a}"
    (kinds, settings), (other_kinds, other_settings) = _facts(a), _facts(b)
    for path in sorted(kinds.keys() | other_kinds.keys()):
        if kinds.get(path) != other_kinds.get(path):
            return f"{name_a}{path} is a {kinds.get(path)}, {name_b}{path} a {other_kinds.get(path)}"
    for path in sorted(settings.keys() | other_settings.keys()):
        here, there = settings.get(path), other_settings.get(path)
        if not _alike(here, there):
            return f"{name_a}{path} is {here!r}, {name_b}{path} is {there!r}"
    return None


def _facts(module: nnx.Module) -> tuple[dict[str, str], dict[str, object]]:
    """Map the path of every module (or other nnx.Pytree) inside a module, as "/attention", to the name of its class;
    and that of every attribute that is neither module, variable, array nor random state, to its value."""
    inside = (nnx.Pytree, nnx.Variable, jax.Array, jax.ShapeDtypeStruct, np.ndarray)
    kinds: dict[str, str] = {}
    settings: dict[str, object] = {}
    for parts, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            path = "".join(f"/{part}" for part in parts)
            kinds[path] = type(node).__name__
            own = {name: x for name, x in vars(node).items() if not name.startswith("_pytree__")}  # not NNX's notes
            settings |= {f"{path}/{name}": x for name, x in own.items() if not isinstance(x, inside)}
    return kinds, settings


def _alike(a: Any, b: Any) -> bool:
    """Compare hyperparameters; functions by their code, since a layer's lambda is another object in every layer."""
    try:
        return _equal(a, b)
    except Exception:  # arrays, functions that refer to themselves, and whatever cannot be compared
        return False


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, functools.partial):
        return _equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if callable(a) and hasattr(a, "__code__"):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return a.__code__ == b.__code__ and _equal(cells[0], cells[1]) and _equal(a.__defaults__, b.__defaults__)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)
