"""A Flax module with a layer stack that nobody wrote as one: prefix and suffix are its loss with the layers cut out.

The prefix is the loss up to the call of the first layer. The suffix is the whole loss again, with the stack's output in
the place of the layers; XLA removes what only the prefix needs. Both run the same module with the same key, so what the
suffix computes again (a mask, a skip connection, dropout) is what the prefix computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp

from jzero.adapters.cut import Arguments, LayerCall, LayerInput, NoCut, calls_handled, find_call, finish, first_call
from jzero.adapters.layer_paths import Layers
from jzero.adapters.methods import (
    FlaxModel,
    ModuleModel,
    Outcome,
    add_state,
    changed,
    copy_description,
    stack_outputs,
    with_taken,
)
from jzero.errors import ConfigError, in_a_line
from jzero.model import ENDS, STACK, Inputs, stack_loss
from jzero.optimizers.muon import FUSED
from jzero.stored_names import StoredNames
from jzero.tree import PyTree, named, path_name

Loss = Callable[[Any], PyTree]  # of the module


class StackedModel(FlaxModel):
    """A model from `from_flax(..., stack=path)`.

    Args:
      plain: the model without a stack, whose layers give their calls to `cut.handler`.

    Attributes:
      names: of the parameters in the module, and so in checkpoints.
      one_key: prefix and suffix run the same module, so they get the same key; see `jzero.model.suffix_key`.
    """

    one_key = True

    def __init__(self, plain: ModuleModel, layers: Layers):
        self.plain, self.layers, self.places = plain, layers, layers.places
        self.name, self.has_aux, self.call_layer = plain.name, plain.has_aux, layers.function(plain)
        whole = jax.eval_shape(lambda: plain.init(jax.random.key(0)))
        self.shapes = jax.eval_shape(self.places.split, whole)
        self.names = StoredNames(tuple(self.places.names(whole).items()))
        self.state = frozenset(name for name, parts in self.names.parameters if parts[0] in plain.state)
        self._calls: dict[object, LayerCall] = {}
        copy_description(self, plain, ("report_notes", "vocabulary", "check_batch", "divided"))
        if hasattr(plain, FUSED):
            self.fused_matrices = self._in_the_stack(getattr(plain, FUSED))

    def __repr__(self) -> str:
        return f"from_flax({self.name}, stack={self.layers.path!r})"

    def _in_the_stack(self, fused: Mapping[str, Any]) -> dict[str, Any]:
        """Name the parameters of `fused_matrices` as here; unknown ones as they are, for the error that names them.

        Raises:
          ConfigError: the layers of a stack are cut differently.
        """
        found = dict(fused)
        for name, parts in self.names.parameters:
            cuts = {part: found.pop(part, None) for part in parts}
            first = cuts[parts[0]]
            for part, cut in cuts.items():
                if cut != first:
                    raise ConfigError(
                        f"{self!r}: {FUSED} has {cut!r} for {part} and {first!r} for {parts[0]}, which are one "
                        "parameter of the stack; cut all layers in the same way, or leave out stack="
                    )
            if first is not None:
                found[name] = first
        return found

    def module(self, params: PyTree, rng: jax.Array | None = None) -> Any:
        return self.plain.module(self.places.join(params), rng)

    def init(self, rng: jax.Array) -> PyTree:
        return self.places.split(self.plain.init(rng))

    def adopt(self, values: PyTree) -> PyTree:
        """Convert what the model without a stack adopts; leave this model's own parameters as they are."""
        if isinstance(values, dict) and set(values) == {ENDS, STACK}:
            return values
        return self.places.split(self.plain.adopt(values))

    def predicting(self, fn: Callable | None) -> Self:
        """Return the model with `fn(module, batch)`, or `module(batch)`, in the place of the loss."""
        return changed(self, plain=self.plain.predicting(fn), has_aux=False, _calls={})

    def prefix(self, ends: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        call = self._call(ends, batch, rng, extra)
        first = first_call(lambda: self._run(ends, self._layer(ends), rng, self._loss(batch, rng, extra)))
        return add_state(self, call.pack(first), {})

    def block(self, layer: PyTree, x: LayerInput, rng: jax.Array | None) -> PyTree:
        output, new = self.call_layer(layer, rng, x.arguments(rng))
        return add_state(self, x.after(output), new)

    def suffix(self, ends: PyTree, x: LayerInput, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        layer = self._layer(ends)

        def run() -> Outcome:
            return self._run(ends, layer, rng, self._loss(batch, rng, extra))

        call_layer = partial(self.call_layer, layer, rng)
        return add_state(self, *finish(run, self.places.layers, x, lambda arguments: call_layer(arguments)[0]))

    def loss(self, params: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        return stack_loss(self, params, Inputs(batch, **extra), rng)

    def _loss(self, batch: PyTree, rng: jax.Array | None, extra: dict[str, PyTree]) -> Loss:
        return lambda module: self.plain.loss_fn(module, batch, rng, **extra)

    def _run(self, ends: PyTree, layer: PyTree, rng: jax.Array | None, f: Loss) -> Outcome:
        """Compute `f(module)`, and the new state of the ends; every layer has the parameters `layer`."""
        with self.layers.handing_over():
            result, new = self.plain.run(self.places.join_alike(ends, layer), rng, f)
        values, start = named(new), f"{ENDS}/"
        own = {name.removeprefix(start): parts[0] for name, parts in self.names.parameters if name.startswith(start)}
        return result, {name: values[part] for name, part in own.items() if part in values}

    def _call(self, ends: PyTree, batch: PyTree, rng: jax.Array | None, extra: dict[str, PyTree]) -> LayerCall:
        """Find how the layers are called, once for each kind of batch."""
        shapes: PyTree = jax.tree.map(_shape_of, (ends, batch, extra))
        leaves, tree = jax.tree.flatten(shapes)
        kind = tree, tuple(leaves), rng is None
        if kind not in self._calls:
            self._calls[kind] = self._find_call(shapes, training=rng is not None)
        return self._calls[kind]

    def _find_call(self, shapes: tuple[PyTree, PyTree, dict[str, PyTree]], training: bool) -> LayerCall:
        ends, *inputs = shapes

        def key() -> jax.Array | None:
            return jax.random.key(0) if training else None

        def run(ends: PyTree, layer: PyTree, batch: PyTree, extra: dict[str, PyTree]) -> Outcome:
            rng = key()
            return self._run(ends, layer, rng, self._loss(batch, rng, extra))

        def call_layer(layer: PyTree, arguments: Arguments) -> PyTree:
            return self.call_layer(layer, key(), arguments)[0]

        try:
            operands = ends, self._layer_shapes(ends), *inputs
            return find_call(run, call_layer, self.layers.name_of, self.places.layers, operands)
        except NoCut as reason:
            raise ConfigError(self.layers.advice(str(reason))) from None
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(self.layers.advice(f"without the layers it fails with {in_a_line(error)}")) from error

    def _layer(self, ends: PyTree) -> PyTree:
        """Make the parameters that are in every layer's place while the ends run: zeros, which XLA removes."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._layer_shapes(ends))

    def _layer_shapes(self, ends: PyTree) -> PyTree:
        """Return the shapes of a layer's parameters, in the dtype to which the step casts those of the ends."""
        own = named(self.shapes[ENDS])
        casts = [x.dtype for name, x in named(ends).items() if x.dtype != own[name].dtype]

        def shape(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            kept = not casts or not jnp.issubdtype(x.dtype, jnp.floating) or f"{STACK}/{path_name(path)}" in self.state
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype if kept else casts[0])

        return jax.tree_util.tree_map_with_path(shape, self.shapes[STACK])


class MethodsModel(StackedModel):
    """A stacked model whose module has `prefix(batch) -> x` and `suffix(x, batch)`; a layer is `x = layer(x)`."""

    one_key = False
    end: Callable | None = None  # instead of the module's suffix

    def prefix(self, ends: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        return self._method("prefix", ends, rng, lambda module: with_taken(extra, module.prefix, batch))

    def block(self, layer: PyTree, x: PyTree, rng: jax.Array | None) -> PyTree:
        return add_state(self, *self.call_layer(layer, rng, ((x,), {})))

    def suffix(self, ends: PyTree, x: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        def call(module: Any) -> PyTree:
            return with_taken(extra, partial(self.end, module) if self.end else module.suffix, x, batch)

        return self._method(self.end or "suffix", ends, rng, call)

    def predicting(self, fn: Callable | None) -> Self:
        """Return the model with `fn(module, x, batch)`, or `module.outputs(x, batch)`, in the place of the suffix."""
        return changed(self, end=fn or stack_outputs, has_aux=False)

    def _method(self, name: object, ends: PyTree, rng: jax.Array | None, f: Loss) -> PyTree:
        """Run a method of the module, or a function of it."""

        def refuse(number: int | None, arguments: Arguments) -> NoReturn:
            raise ConfigError(f"{self!r}: {name} calls {self.layers.name_of(number or 0)}: jzero runs the layers")

        with calls_handled(refuse):  # and without values, so that nothing uses the layers by other means
            return add_state(self, *self._run(ends, self._layer_shapes(ends), rng, f))


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
