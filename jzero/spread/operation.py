"""Operations: functions of a model that have a way of their own to run on the devices of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jzero._compat import function_primitive
from jzero.errors import ConfigError
from jzero.spread.rules import rule
from jzero.spread.value import Group, Value
from jzero.tracing.source_lines import located_here


class Operation:
    """A function of arrays that runs on shards by a function of its own instead of by the rules of its primitives.

    A kernel (Pallas) that a model calls is one: in `jzero.spread` a primitive without a rule runs on whole arrays.

    Args:
      plain: `plain(*arrays, **static) -> tree of arrays`, for one device; differentiable if the model trains through
        it. Positional arguments are trees of arrays; keywords are hashable and no arrays.
      spread: `spread(group, *values, **static) -> tree of Values`, of the structure that `plain` returns. Each
        `jzero.spread.Value` says what this device holds of an array. It must be differentiable as it stands: the
        gradient of a value that is whole is the sum, over the devices, of the gradients that each computes.
      name: names it in reports; default: that of `plain`.

    >>> double = Operation(lambda x: x + x, lambda group, x: Value(x.x + x.x, x.shape, x.dims, x.partial), "double")
    >>> double(jax.numpy.ones(2)).tolist()
    [2.0, 2.0]
    """

    def __init__(self, plain: Callable, spread: Callable, name: str | None = None):
        self.plain, self.spread = plain, spread
        self.name = name or getattr(plain, "__name__", repr(plain))
        # Two operations may have one name, and the table of rules goes by names.
        self._primitive = function_primitive(f"{self.name}_{id(self):x}")
        rule(self._primitive.name)(self._on_group)

    def __repr__(self) -> str:
        return f"Operation({self.name})"

    def __call__(self, *args: Any, **static: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        self._check(static)

        def flat(*xs: Any) -> Any:
            return self.plain(*jax.tree.unflatten(treedef, xs), **static)

        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        jaxpr = located_here(jaxpr)
        call = treedef, tuple(sorted(static.items())), jax.tree.structure(shape)
        return jax.tree.unflatten(call[-1], self._primitive.bind(*leaves, jaxpr=jaxpr, call=call))

    def _check(self, static: dict[str, Any]) -> None:
        for name, value in static.items():
            try:
                hash(value)
            except TypeError:
                raise ConfigError(
                    f"{self}: {name} = {value!r} has no hash: pass arrays by position, and lists as tuples"
                ) from None

    def _on_group(self, group: Group, eqn: Any, values: list[Value]) -> list[Value]:
        treedef, keywords, wanted = eqn.params["call"]
        out = self.spread(group, *jax.tree.unflatten(treedef, values), **dict(keywords))
        leaves, found = jax.tree.flatten(out, is_leaf=lambda x: isinstance(x, Value))
        if found != wanted or not all(isinstance(x, Value) for x in leaves):
            raise ConfigError(
                f"{self}: spread must return Values in the structure of plain, {wanted}; returned {found}"
            )
        return leaves
