"""A Flax module with a layer stack that nobody wrote as one: prefix and suffix are its loss with the layers cut out.

The prefix is the loss up to the call of the first layer. The suffix is the whole loss again, with the stack's output in
the place of the layers; XLA removes what only the prefix needs. Both run the same module with the same key, so what the
suffix computes again (a mask, a skip connection, dropout) is what the prefix computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jzero.adapters.cut import NoCut, calls_handled, find_call, finish, first_call
from jzero.adapters.layer_call import Call, LayerInput
from jzero.adapters.nnx_model import taken
from jzero.adapters.torch_habits import refuses_of_models
from jzero.errors import ConfigError, in_a_line
from jzero.model import ENDS, STACK, Inputs, stack_loss
from jzero.optimizers.muon import FUSED
from jzero.pictures.html import ParametersInHTML
from jzero.stored_names import StoredNames
from jzero.tree import PyTree, named, path_name


@refuses_of_models
class StackedModel(ParametersInHTML):
    """A model from `from_flax(..., stack=path)`.

    Args:
      plain: the model without a stack, whose layers give their calls to `layer_call.handler`.
      layers: `NNXLayers` or `LinenLayers`.

    Attributes:
      names: of the parameters in the module, and so in checkpoints.
      one_key: prefix and suffix run the same module, so they get the same key; see `jzero.model.suffix_key`.
    """

    one_key = True

    def __init__(self, plain: Any, layers: Any):
        self.plain, self.layers, self.places = plain, layers, layers.places
        whole = jax.eval_shape(lambda: plain.init(jax.random.key(0)))
        self.shapes = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        self.names = StoredNames(tuple(self.places.names(whole).items()))
        self.state = frozenset(name for name, parts in self.names.parameters if parts[0] in plain.state)
        self.has_aux = plain.has_aux
        self.call_layer = layers.function(plain)
        self._calls: dict[Any, Call] = {}
        for name in ("report_notes", "vocabulary", "check_batch", "divided"):
            if hasattr(plain, name):
                setattr(self, name, getattr(plain, name))
        if hasattr(plain, FUSED):
            self.fused_matrices = self._in_the_stack(plain.fused_matrices)

    def _in_the_stack(self, fused: Mapping[str, Any]) -> dict[str, Any]:
        """Name the parameters of `fused_matrices` as here; unknown ones as they are, for the error that names them.

        Raises:
          ConfigError: the layers of a stack are cut differently.
        """
        found, named = {}, {part for _, parts in self.names.parameters for part in parts}
        for name, parts in self.names.parameters:
            cuts = [fused.get(part) for part in parts]
            if any(cut != cuts[0] for cut in cuts):
                other = next(part for part, cut in zip(parts, cuts, strict=True) if cut != cuts[0])
                raise ConfigError(
                    f"{self!r}: {FUSED} has {fused.get(other)!r} for {other} and {cuts[0]!r} for {parts[0]}, which are "
                    "one parameter of the stack; cut all layers alike, or leave out stack="
                )
            if cuts[0] is not None:
                found[name] = cuts[0]
        return found | {name: cut for name, cut in fused.items() if name not in named}

    def __repr__(self) -> str:
        return f"{str(self.plain).removesuffix(')')}, stack={self.layers.path!r})"

    def module(self, params: Any, rng: jax.Array | None = None) -> Any:
        return self.plain.module(self.places.join(params), rng)

    def init(self, rng: jax.Array) -> Any:
        return self.places.split(self.plain.init(rng))

    def adopt(self, values: Any) -> Any:
        """Convert what the model without a stack adopts; leave this model's own parameters as they are."""
        if isinstance(values, dict) and set(values) == {ENDS, STACK}:
            return values
        return self.places.split(self.plain.adopt(values))

    def predicting(self, fn: Callable | None) -> StackedModel:
        """Return the model with `fn(module, batch)`, or `module(batch)`, in the place of the loss."""
        other = copy.copy(self)
        other.plain, other.has_aux, other._calls = self.plain.predicting(fn), False, {}
        return other

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        inputs = batch, rng, extra
        call = self._call(ends, inputs)
        args, kwargs = first_call(lambda: self._run(ends, self._layer(ends), inputs))
        x = call.pack(args, kwargs)
        return (x, {}) if self.state else x

    def block(self, layer: Any, x: LayerInput, rng: jax.Array | None) -> Any:
        args, kwargs = x.arguments(rng)
        output, new = self.call_layer(layer, rng, args, kwargs)
        return (x.after(output), new) if self.state else x.after(output)

    def suffix(self, ends: Any, x: LayerInput, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        layer, inputs = self._layer(ends), (batch, rng, extra)

        def call_layer(args: tuple, kwargs: dict[str, Any]) -> Any:
            return self.call_layer(layer, rng, args, kwargs)[0]

        result, new = finish(lambda: self._run(ends, layer, inputs), self.places.layers, x, call_layer)
        return (result, new) if self.state else result

    def loss(self, params: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        return stack_loss(self, params, Inputs(batch, **extra), rng)

    def _run(self, ends: PyTree, layer: PyTree, inputs: tuple) -> tuple[Any, dict[str, Any]]:
        """Run the whole loss; return (what it returns, new state of the ends)."""
        batch, rng, extra = inputs
        with self.layers.handing_over():
            result = self.plain.loss(self.places.join_alike(ends, layer), batch, rng, **extra)
        if not self.plain.state:
            return result, {}
        result, new = result
        own = {
            parts[0]: name.removeprefix(f"{ENDS}/") for name, parts in self.names.parameters if name.startswith(ENDS)
        }
        return result, {own[name]: x for name, x in named(new).items() if name in own}

    def _call(self, ends: PyTree, inputs: tuple) -> Call:
        """Find how the layers are called, once for each kind of batch."""
        batch, rng, extra = inputs
        shapes: Any = jax.tree.map(_shape_of, (ends, batch, extra))
        leaves, tree = jax.tree.flatten(shapes)
        kind = tree, tuple((x.shape, x.dtype) for x in leaves), rng is None
        if kind not in self._calls:
            self._calls[kind] = self._find_call(shapes, rng is not None)
        return self._calls[kind]

    def _find_call(self, shapes: tuple, training: bool) -> Call:
        def run(ends: PyTree, layer: PyTree, inputs: tuple) -> Any:
            batch, extra = inputs
            return self._run(ends, layer, (batch, jax.random.key(0) if training else None, extra))

        def call_layer(layer: PyTree, args: tuple, kwargs: dict[str, Any]) -> Any:
            return self.call_layer(layer, jax.random.key(0) if training else None, args, kwargs)[0]

        ends, batch, extra = shapes
        try:
            layer = self._layer_shapes(ends)
            return find_call(run, call_layer, self.layers.name_of, self.places.layers, ends, layer, (batch, extra))
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

        def shape(path: tuple, x: Any) -> jax.ShapeDtypeStruct:
            kept = not casts or not jnp.issubdtype(x.dtype, jnp.floating) or f"{STACK}/{path_name(path)}" in self.state
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype if kept else casts[0])

        return jax.tree_util.tree_map_with_path(shape, self.shapes[STACK])


class MethodsModel(StackedModel):
    """A stacked model whose module has `prefix(batch) -> x` and `suffix(x, batch)`; a layer is `x = layer(x)`."""

    one_key = False
    end: Callable | None = None  # instead of the module's suffix

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        return self._method("prefix", ends, (batch, rng, extra), ())

    def block(self, layer: Any, x: Any, rng: jax.Array | None) -> Any:
        output, new = self.call_layer(layer, rng, (x,), {})
        return (output, new) if self.state else output

    def suffix(self, ends: Any, x: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        return self._method(self.end or "suffix", ends, (batch, rng, extra), (x,))

    def predicting(self, fn: Callable | None) -> MethodsModel:
        """Return the model with `fn(module, x, batch)`, or `module.outputs(x, batch)`, in the place of the suffix."""
        other = copy.copy(self)
        other.end, other.has_aux = fn or _outputs, False
        return other

    def _method(self, method: str | Callable, ends: Any, inputs: tuple, args: tuple) -> Any:
        """Run a method of the module, or a function of it."""
        part = copy.copy(self)
        part.plain = copy.copy(self.plain)

        def call(module: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
            f = getattr(module, method) if isinstance(method, str) else partial(method, module)
            return f(*args, batch, **taken(f, extra))

        def refuse(number: int | None, args: tuple, kwargs: dict[str, Any]) -> Any:
            raise ConfigError(f"{self!r}: {method} calls {self.layers.name_of(number or 0)}: jzero runs the layers")

        part.plain.loss_fn = call
        with calls_handled(refuse):  # and without values, so that nothing uses the layers by other means
            result, new = part._run(ends, self._layer_shapes(ends), inputs)
        return (result, new) if self.state else result


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _outputs(module: Any, x: Any, batch: Any) -> Any:
    if not hasattr(module, "outputs"):
        raise ConfigError(
            f"{type(module).__name__} has no predictions: give it a method outputs(x, batch), with x the output of its "
            "layers, or pass a function of (module, x, batch) to jzero.make_eval_step"
        )
    return module.outputs(x, batch)
