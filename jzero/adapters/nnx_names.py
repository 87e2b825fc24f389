"""Names the operations of an NNX module's parts, as Linen does: `jax.named_scope`s in traces, programs and profiles."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from jzero._compat import subclass


def name_parts(module: nnx.Module) -> None:
    """Let each part of a module that is called run in a scope with its name: "fc1", "layers/3".

    The name is the path from the part that calls it, so scopes nest as the calls do.
    """
    called = {path: part for path, part in nnx.iter_modules(module) if callable(part)}
    for path, part in called.items():
        if path:
            above = next(n for n in reversed(range(len(path))) if n == 0 or path[:n] in called)
            cls: Any = _named(type(part), "/".join(map(str, path[above:])))
            object.__setattr__(part, "__class__", cls)  # nnx.Module.__setattr__ would record it


@functools.cache
def _named(cls: Any, name: str) -> type:
    """Make a class like `cls` whose calls run in a scope."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return cls.__call__(self, *args, **kwargs)

    space = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    try:
        return subclass(cls, space)
    except Exception:  # a metaclass or `__init_subclass__` of the user's own refuses it; the part then has no name
        return cls
