"""NNX modules as models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, Self

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.adapters.methods import ModuleModel, Outcome, add_state, changed, copy_description, stack_outputs, with_taken
from jzero.adapters.nnx_apply import VALUES, Apply, Build, constants_of
from jzero.errors import ConfigError, some_of
from jzero.model import ENDS, STACK, Inputs, stack_loss
from jzero.tree import PyTree, named


class NNXModel(ModuleModel):
    """An NNX module and a loss function as a model.

    Attributes:
      apply: the module as a function of its parameters.
    """

    def __init__(
        self, build: Build, abstract: nnx.Module, loss_fn: Callable, has_aux: bool = False, sync_batch_norm: bool = True
    ):
        self.build, self.loss_fn, self.has_aux, self.name = build, loss_fn, has_aux, type(abstract).__name__
        self.apply = Apply(abstract, constants_of(build), sync_batch_norm=sync_batch_norm)
        self.state = self.apply.state
        copy_description(self, abstract)
        if self.apply.fixed:
            notes: Callable = getattr(self, "report_notes", lambda dtype: [])
            line = "use_running_average or deterministic is true, as built, in training too"
            self.report_notes = lambda dtype: [*notes(dtype), f"{some_of(self.apply.fixed)}: {line}"]

    def init(self, rng: jax.Array) -> PyTree:
        return self.adopt(self.build(nnx.Rngs(rng)))

    def adopt(self, values: PyTree) -> PyTree:
        """Convert a module, an nnx.State or a pure dict to the model's parameters, without the random state."""
        if isinstance(values, nnx.Module):
            values = nnx.state(values)
        if isinstance(values, nnx.State):
            return nnx.to_pure_dict(nnx.filter_state(values, VALUES))
        random = self.apply.random_names
        if not isinstance(values, dict) or random.isdisjoint(named(values)):
            return values
        leaves = flatten_dict(values)
        return unflatten_dict({path: x for path, x in leaves.items() if "/".join(map(str, path)) not in random})

    def module(self, params: PyTree, rng: jax.Array | None = None) -> Any:
        return self.apply(params, rng)

    def run(self, params: PyTree, rng: jax.Array | None, f: Callable[[Any], PyTree]) -> Outcome:
        return self.apply.run(params, rng, f)


class NNXStackModel(NNXModel):
    """An NNX module with `prefix`, `stack` and `suffix` as a model with a layer stack."""

    end: Callable | None = None  # instead of the module's suffix

    def __init__(self, build: Build, abstract: Any, has_aux: bool = False, sync_batch_norm: bool = True):
        super().__init__(build, abstract, stack_outputs, has_aux, sync_batch_norm)
        self.name = repr(getattr(abstract, "config", self.name))
        self.takes_extra = any("extra" in signature(f).parameters for f in (abstract.prefix, abstract.suffix))
        apply = partial(Apply, constants=self.apply.constants, sync_batch_norm=sync_batch_norm)
        stack = abstract.stack
        self.layer = apply(stack, keys=((STACK,),), stacked=True)
        del abstract.stack
        self.ends = apply(abstract)
        abstract.stack = stack  # for the methods that describe the module, which belong to this object
        states = ((ENDS, self.ends), (STACK, self.layer))
        self.state = frozenset(f"{part}/{name}" for part, apply in states for name in apply.state)

    def adopt(self, values: PyTree) -> PyTree:
        params = super().adopt(values)
        converted = not isinstance(values, nnx.Module | nnx.State) and set(params) == {ENDS, STACK}
        if converted or STACK not in params:
            return params
        return {STACK: params[STACK], ENDS: {name: x for name, x in params.items() if name != STACK}}

    def module(self, params: PyTree, rng: jax.Array | None = None) -> Any:
        return self.apply({**params[ENDS], STACK: params[STACK]}, rng)

    def loss(self, params: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        return stack_loss(self, params, Inputs(batch, **extra), rng)

    def prefix(self, ends: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        if extra and not self.takes_extra:
            raise ConfigError("extra: neither prefix nor suffix takes it; write def suffix(self, x, batch, extra)")
        return add_state(self, *self.ends.run(ends, rng, lambda module: with_taken(extra, module.prefix, batch)))

    def block(self, layer: PyTree, x: PyTree, rng: jax.Array | None) -> PyTree:
        return add_state(self, *self.layer.run(layer, rng, lambda module: module(x)))

    def suffix(self, ends: PyTree, x: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        def call(module: Any) -> PyTree:
            return with_taken(extra, partial(self.end, module) if self.end else module.suffix, x, batch)

        return add_state(self, *self.ends.run(ends, rng, call))

    def predicting(self, fn: Callable | None) -> Self:
        """Return the model with `fn(module, x, batch)`, or `module.outputs(x, batch)`, in the place of the suffix."""
        return changed(self, end=fn or stack_outputs, has_aux=False)

    def decode_prefix(self, ends: PyTree, tokens: jax.Array, column: Any, padding: Any) -> PyTree:
        return self.ends(ends).decode_prefix(tokens, column, padding)

    def decode_block(self, layer: PyTree, x: PyTree, cache: PyTree) -> tuple[PyTree, PyTree]:
        return self.layer(layer).decode(x, cache)

    def decode_suffix(self, ends: PyTree, x: PyTree) -> jax.Array:
        return self.ends(ends).decode_suffix(x)
