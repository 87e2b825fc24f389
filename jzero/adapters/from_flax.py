"""Flax modules as models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jzero.errors import ConfigError
from jzero.model import ENDS, STACK, Model, stack_loss


def from_flax(module: Any, loss_fn: Callable | None = None, *, example_batch: Any = None) -> Model:
    """Make a model of a Flax module.

    Args:
      module: a function `rngs -> nnx.Module` (a class that takes `rngs` will do), or a Linen module.
      loss_fn: `loss_fn(module, batch)` or `loss_fn(module, batch, rng)` -> scalar or (sum, count); a second value is
        a count, not an auxiliary output; `module`
        is the NNX module or the bound Linen module and rng is None in evaluation. An NNX module with a layer
        stack needs none: it has `prefix(batch) -> x`, `stack` (one block whose parameters were stacked by
        `nnx.vmap`; `stack(x)` is one layer) and `suffix(x, batch) -> loss`.
      example_batch: for Linen, whose parameters' shapes follow from an input: a batch, or its ShapeDtypeStructs.

    Raises:
      ConfigError: state that training would have to carry along (batch statistics, caches), a missing `loss_fn`.

    >>> model = from_flax(lambda rngs: nnx.Linear(3, 1, rngs=rngs), lambda m, b: (m(b["x"]) ** 2).mean())
    >>> jax.tree.map(jnp.shape, model.init(jax.random.key(0)))
    {'bias': (1,), 'kernel': (3, 1)}
    """
    if isinstance(module, linen.Module):
        if loss_fn is None or example_batch is None:
            raise ConfigError("from_flax: a Linen module needs loss_fn(module, batch) and example_batch=...")
        return _Linen(module, _with_rng(loss_fn), example_batch)
    if isinstance(module, nnx.Module):
        name = type(module).__name__
        raise ConfigError(f"from_flax: {name} is built already; pass lambda rngs: {name}(..., rngs=rngs), for init")
    if not callable(module):
        raise ConfigError(f"from_flax: {module!r} is neither a function rngs -> nnx.Module nor a Linen module")
    build = _builder(module)
    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    if all(hasattr(abstract, name) for name in ("prefix", "stack", "suffix")):
        if loss_fn is not None:
            raise ConfigError("from_flax: a module with prefix, stack, suffix has its loss in suffix; drop loss_fn")
        return _NNXStack(build, abstract)
    if loss_fn is None:
        raise ConfigError("from_flax: loss_fn(module, batch) is missing; only prefix, stack, suffix need none")
    return _NNX(build, abstract, _with_rng(loss_fn))


def _with_rng(loss_fn: Callable) -> Callable:
    """`loss_fn` as a function of (module, batch, rng), whether or not it wants the rng: a third without a default."""
    third = list(inspect.signature(loss_fn).parameters.values())[2:3]
    takes_rng = any(p.default is p.empty or p.name == "rng" for p in third)
    return loss_fn if takes_rng else lambda module, batch, rng: loss_fn(module, batch)


def _take_methods(model: Any, module: Any) -> None:
    """The methods of a module that say something about it are the model's."""
    for name in ("report_notes", "weights_layout", "fused_matrices"):
        if hasattr(module, name):
            setattr(model, name, getattr(module, name))


def _builder(module_fn: Callable) -> Callable[[nnx.Rngs], nnx.Module]:
    """`module_fn` as a function of rngs, by position or by keyword."""
    function: Any = module_fn
    while isinstance(function, functools.partial):
        function = function.func
    function = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    parameter = inspect.signature(function).parameters.get("rngs")
    by_keyword = parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY
    return lambda rngs: module_fn(rngs=rngs) if by_keyword else module_fn(rngs)


class _Apply:
    """An NNX module as a pure function of its parameters: `with_params(params, rng) -> module`."""

    def __init__(self, abstract: nnx.Module):
        parts: Any = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
        self.graph, self.params, self.random, rest = parts
        if others := [f"{'.'.join(map(str, path))} ({type(v).__name__})" for path, v in nnx.to_flat_state(rest)]:
            raise ConfigError(
                f"from_flax: {', '.join(others)} is state that is not a parameter; only nnx.Param and random state "
                "are trained (use LayerNorm, RMSNorm or GroupNorm for BatchNorm)"
            )

    def __call__(self, params: Any, rng: jax.Array | None = None) -> Any:
        state = jax.tree.map(lambda v: v, self.params)
        nnx.replace_by_pure_dict(state, params)
        keys, treedef = jax.tree.flatten(self.random)
        base = jax.random.key(0) if rng is None else rng
        fresh = [
            jax.random.fold_in(base, i) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else jnp.zeros((), k.dtype)
            for i, k in enumerate(keys)
        ]
        module = nnx.merge(self.graph, state, jax.tree.unflatten(treedef, fresh))
        module.eval() if rng is None else module.train()
        return module


class _NNX:
    def __init__(self, build: Callable, abstract: nnx.Module, loss_fn: Callable):
        self.build, self.module, self.loss_fn, self.name = build, _Apply(abstract), loss_fn, type(abstract).__name__
        _take_methods(self, abstract)

    def __repr__(self) -> str:
        return f"from_flax({self.name})"

    def init(self, rng: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(self.build(nnx.Rngs(rng)), nnx.Param))

    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> Any:
        return self.loss_fn(self.module(params, rng), batch, rng)


class _NNXStack:
    def __init__(self, build: Callable, abstract: Any):
        self.build, self.name = build, repr(getattr(abstract, "config", type(abstract).__name__))
        self.whole, self.layer = _Apply(abstract), _Apply(abstract.stack)
        _take_methods(self, abstract)
        self.vocabulary = dict(getattr(abstract, "vocabulary", {}))
        del abstract.stack
        self.ends = _Apply(abstract)

    def __repr__(self) -> str:
        return f"from_flax({self.name})"

    def module(self, params: Any, rng: jax.Array | None = None) -> Any:
        return self.whole({**params[ENDS], STACK: params[STACK]}, rng)

    def init(self, rng: jax.Array) -> Any:
        params = nnx.to_pure_dict(nnx.state(self.build(nnx.Rngs(rng)), nnx.Param))
        return {STACK: params.pop(STACK), ENDS: params}

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None) -> Any:
        return self.ends(ends, rng).prefix(batch)

    def block(self, layer: Any, x: Any, rng: jax.Array | None) -> Any:
        return self.layer(layer, rng)(x)

    def suffix(self, ends: Any, x: Any, batch: Any, rng: jax.Array | None) -> Any:
        return self.ends(ends, rng).suffix(x, batch)

    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> Any:
        return stack_loss(self, params, batch, rng)


class _Linen:
    def __init__(self, module: linen.Module, loss_fn: Callable, example_batch: Any):
        self.linen, self.loss_fn, self.example = module, loss_fn, example_batch
        _take_methods(self, module)

    def __repr__(self) -> str:
        return f"from_flax({type(self.linen).__name__})"

    def module(self, params: Any, rng: jax.Array | None = None) -> Any:
        return self.linen.bind({"params": params}, rngs=None if rng is None else {"dropout": rng})

    def init(self, rng: jax.Array) -> Any:
        example = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), x.dtype), self.example)
        init = linen.init(lambda module, batch: self.loss_fn(module, batch, None), self.linen)
        variables = init({"params": rng}, example)
        if others := sorted(set(variables) - {"params"}):
            raise ConfigError(
                f"from_flax: variable collections {others} are not parameters; only parameters are trained (use "
                "LayerNorm, RMSNorm or GroupNorm for BatchNorm)"
            )
        return variables.get("params", {})

    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> Any:
        return self.loss_fn(self.module(params, rng), batch, rng)
