"""Finds the layers of an NNX module: an nnx.List, numbered attributes, or one module stacked by nnx.vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count, takewhile
from typing import Any

import jax
from flax import nnx

from jzero.adapters.advice import nnx_methods
from jzero.adapters.alike import difference
from jzero.adapters.constants import same
from jzero.adapters.layer_call import handler
from jzero.adapters.nnx_model import Apply, Build, NNXModel, abstract_module
from jzero.adapters.places import Key, Places
from jzero.errors import ConfigError, some_of
from jzero.tree import named


class NNXLayers:
    """The layers at a path of an NNX module.

    Args:
      build: builds the module.
      path: of the layers, as "layers" or "encoder.layers".

    Attributes:
      build: builds the module with layers that give their calls to `layer_call.handler`.
      abstract: the module, without values.
      places: of the layers' parameters.
    """

    def __init__(self, build: Build, path: str):
        self.path = path
        plain = abstract_module(build)
        keys, layers, stacked = _find(plain, path)
        _check_alike(plain, path, keys, layers, stacked)
        self._keys, self.name = keys, type(plain).__name__

        def handing_over(rngs: nnx.Rngs) -> nnx.Module:
            module = build(rngs)
            for number, layer in enumerate(_find(module, path)[1]):
                cls: Any = type(layer)
                cls = _handing_over(cls, None if stacked else number)
                object.__setattr__(layer, "__class__", cls)  # nnx.Module.__setattr__ takes only state
            return module

        self.build, self.abstract = handing_over, abstract_module(handing_over)
        length = jax.tree.leaves(nnx.state(layers[0], nnx.Param))[0].shape[0] if stacked else len(layers)
        self.places = Places(tuple(keys), length, stacked)

    def name_of(self, number: int) -> str:
        return f"{self.path}[{number}]"

    def function(self, plain: NNXModel) -> Callable:
        """Make the pure function of one layer: (parameters, rng, args, kwargs) -> (output, new state)."""
        whole, layer = plain.module, _find(self.abstract, self.path)[1][0]
        stack = _dotted(self._keys[0]) if self.places.stacked else None
        constants: Any = whole.constants if stack else _SameConstants(whole.constants, self._keys)
        apply = Apply(layer, constants, stack, sync_batch_norm=whole.sync_batch_norm)

        def call(
            weights: Any, rng: jax.Array | None, args: tuple, kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            module = apply(weights, rng)
            result = apply.with_new_state(module, module(*args, **kwargs))
            return result if apply.state else (result, {})

        return call

    def handing_over(self) -> AbstractContextManager:
        """Return the context in which the layers give their calls to the handler."""
        return unrolled(self.places.layers) if self.places.stacked else nullcontext()

    def advice(self, reason: str) -> str:
        """Say what to write instead of `stack=`."""
        return nnx_methods(self.name, self.path, reason)


@contextmanager
def unrolled(layers: int) -> Iterator[None]:
    """Run `lax.scan` as a Python loop up to the last layer, so that the handler gets the values between the layers."""
    handle: Any = handler.get()
    calls, scope = 0, ExitStack()

    def counted(number: int | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls == layers:
            scope.close()
        return handle(number, args, kwargs)

    scope.enter_context(jax.disable_jit())
    token = handler.set(counted)
    try:
        yield
    finally:
        handler.reset(token)
        scope.close()


class _SameConstants:
    """The constants that every layer of a list holds alike."""

    def __init__(self, constants: Any, keys: Sequence[Key]):
        self.constants, self.keys = constants, [f"{_dotted(key)}." for key in keys]

    @property
    def values(self) -> dict[str, Any]:
        values = self.constants.values
        first, *others = (
            {name.removeprefix(key): x for name, x in values.items() if name.startswith(key)} for key in self.keys
        )
        for key, other in zip(self.keys[1:], others, strict=True):
            for name, x in first.items():
                if not isinstance(x, jax.core.Tracer) and not same(x, other[name]):
                    raise ConfigError(
                        f"from_flax: the constant {name} differs between {self.keys[0][:-1]} and {key[:-1]}: make it "
                        "an nnx.Param and name it in frozen_parameters"
                    )
        return first

    @property
    def fingerprint(self) -> Any:
        return self.constants.fingerprint


@functools.cache
def _handing_over(cls: type, number: int | None) -> type:
    """Make a class like `cls` whose calls go to the handler, while there is one."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = handler.get()
        return cls.__call__(self, *args, **kwargs) if handle is None else handle(number, args, kwargs)

    space = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), space)


def _find(module: Any, path: str) -> tuple[list[Key], list[Any], bool]:
    """Return the keys of the layers, the layers, and whether they are one stacked module.

    Raises:
      ConfigError: there is nothing at the path, or no layers.
    """
    *parents, last = path.split(".")
    node = module
    key: Key = ()
    for part in parents:
        node, part = _child(node, part)
        if node is None:
            raise _unknown(module, path)
        key += (part,)
    found, last_key = _child(node, last)
    if found is None:
        names = _numbered(node, last)
        if not names:
            raise _unknown(module, path)
        return [(*key, name) for name in names], [getattr(node, name) for name in names], False
    key += (last_key,)
    if isinstance(found, nnx.Sequential):
        found, key = found.layers, (*key, "layers")
    if isinstance(found, nnx.Module) and not isinstance(found, nnx.List):
        return [key], [found], True
    layers = list(found) if isinstance(found, nnx.List | list | tuple) else []
    if not all(isinstance(layer, nnx.Module) for layer in layers):
        other = next(layer for layer in layers if not isinstance(layer, nnx.Module))
        raise ConfigError(f"stack = {path!r}: {other!r} is no nnx.Module; all layers must be modules of one class")
    if not isinstance(found, nnx.List | list | tuple):
        raise _unknown(module, path)
    return [(*key, i) for i in range(len(layers))], layers, False


def _child(node: Any, part: str) -> tuple[Any, Any]:
    """Return the attribute or element of a node, and its key; None if it has none."""
    if isinstance(node, nnx.List | list | tuple) and part.isdecimal():
        return (node[int(part)], int(part)) if int(part) < len(node) else (None, part)
    return getattr(node, part, None), part


def _numbered(node: Any, name: str) -> list[str]:
    """List the attributes name_0, name_1, ..., or else name0, name1, ..."""
    for separator in ("_", ""):
        if found := list(takewhile(partial(hasattr, node), (f"{name}{separator}{i}" for i in count()))):
            return found
    return []


def _unknown(module: Any, path: str) -> ConfigError:
    """Make the error about a path, with those that would do."""
    known = []
    for where, node in nnx.iter_modules(module):
        if isinstance(node, nnx.List) and len(node) > 1 and isinstance(node[0], nnx.Module):
            known.append(f"{_dotted(where)!r} ({len(node)} x {type(node[0]).__name__})")
    names = some_of(sorted(name for name, _ in nnx.iter_children(module)))
    do = f"the lists of modules are {some_of(known)}" if known else f"it has no list of modules, only {names}"
    return ConfigError(f"stack = {path!r}: {type(module).__name__} has no layers there; {do}")


def _check_alike(module: Any, path: str, keys: Sequence[Key], layers: Sequence[Any], stacked: bool) -> None:
    """Raise a ConfigError unless the layers are equal, and share nothing with other parts of the module."""
    what = f"stack = {path!r}"
    if not stacked and len(layers) < 2:
        raise ConfigError(f"{what}: has {len(layers)} layers, must have at least 2: leave out stack=")
    leaves = named(nnx.to_pure_dict(nnx.state(layers[0], nnx.Param)))
    if not leaves:
        raise ConfigError(f"{what}: {type(layers[0]).__name__} has no parameters: leave out stack=")
    if stacked:
        lengths = {x.shape[:1]: name for name, x in leaves.items()}
        if len(lengths) > 1 or () in lengths:
            raise ConfigError(
                f"{what}: is one {type(layers[0]).__name__}, whose leaves {some_of(lengths.values())} have no common "
                "layer axis: name an nnx.List, or a module whose layers nnx.vmap stacked"
            )
    for key, layer in zip(keys[1:], layers[1:], strict=True):
        if problem := difference(layers[0], layer, _slashed(keys[0]), _slashed(key)):
            raise ConfigError(
                f"{what}: the layers differ: {problem}. One program runs all layers of a stack: leave out stack=, or "
                "build them alike and move what differs into a parameter"
            )
    whole = set(named(nnx.to_pure_dict(nnx.state(module, nnx.Variable))))
    for key, layer in zip(keys, layers, strict=True):
        for name in named(nnx.to_pure_dict(nnx.state(layer, nnx.All(nnx.Variable, nnx.Not(nnx.RngState))))):
            if f"{_slashed(key)}/{name}" not in whole:
                raise ConfigError(
                    f"{what}: {_slashed(key)}/{name} is also a variable of another part of the module: the layers of "
                    "a stack share no variables; leave out stack="
                )


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


def _slashed(key: Key) -> str:
    return "/".join(map(str, key))
