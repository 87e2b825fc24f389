"""A model as a list of layers, like DeepSpeed's: `PipelineModule([LayerSpec(...), ...], loss_fn=...)`.

Most networks repeat one block many times, with other layers before and after it. If such a run of layers holds at
least half of the parameters, the module is prefix + layer stack + suffix as in `jzero.model`, and its parameters are

    {"ends": {"layers": {"0": ...}, "tied": {key: ...}}, "stack": the run's, on a leading axis}

Otherwise the module is heterogeneous, with parameters {"layers": {"0": ..., "1": ...}, "tied": {key: ...}}. A pipeline
cuts the stack. If there is none, or the stages do not divide it, the pipeline cuts the list of layers: see
`jzero.pipeline.layer_switch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from jzero.adapters.constants import shapes_only
from jzero.adapters.methods import FlaxModel, Outcome, add_state, changed, extra_for, inputs_and_labels
from jzero.errors import ConfigError, refuse_keywords
from jzero.model import ENDS, STACK, Inputs, fold, stack_loss
from jzero.pipeline.layer_spec import (
    Layer,
    LayerSpec,
    TiedLayerSpec,
    is_linen,
    layer_name,
    make_layer,
    partition_layers,
    prefixed_errors,
    same_spec,
    show,
    signature,
    size,  # fmt: skip
)
from jzero.tree import PyTree, named

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
_SEED = "leave it out: the config's seed decides, and layer i has the same values under any number of stages"
_INSTEAD = {  # what replaces DeepSpeed's other arguments
    "topology": "pass num_stages; the config's mesh section, or jzero.make_mesh, has the other axes",
    "base_seed": _SEED,
    "seed_layers": _SEED,
    "seed_fn": _SEED,
    "activation_checkpoint_func": "leave it out; the config's activation_checkpointing has the policies",
    "checkpointable_layers": "leave it out; activation_checkpoint_interval counts layers of every kind",
    "dynamic_shape": "leave it out; a batch of another shape compiles another step",
}
LAYERS, TIED = "layers", "tied"


class PipelineModule(FlaxModel):
    """A model that runs layers one after the other, each on the output (any pytree) of the previous one, then a loss.

    A batch is `(inputs, labels)`. The module is a model in the sense of `jzero.model`: it has `init` and `loss`, and
    with a layer stack also `prefix`, `block` and `suffix`.

    Args:
      layers: any of `LayerSpec`, `TiedLayerSpec`, Linen modules, functions `x -> x`.
      num_stages: the number of pipeline stages, like `mesh.pipe` in the config; the parameters do not depend on it.
      loss_fn: `loss_fn(outputs, labels)` -> a scalar, or `jzero.Mean(sum, count)`; a keyword argument `extra` gets what
        is passed to the step besides the batch.
      has_aux: `loss_fn` returns (loss, {name: metric}), each metric a scalar or a `Mean`.
      partition_method: how `boundaries` cuts, see `jzero.pipeline.layer_spec`.
      activation_checkpoint_interval: the number of layers in one activation checkpoint; 0: the config decides.
      example_batch: a batch, or its ShapeDtypeStructs. Linen layers need it, because their parameters take their
        shapes from an input. With it, layers that do not fit together are an error here; without it, in the first step.

    Attributes:
      stack: the range of the layers in the stack; None in a heterogeneous module.

    Raises:
      ConfigError: an item that is not a layer, layers that do not fit together, stages that do not fit the layers.

    >>> from flax import nnx
    >>> block = LayerSpec(nnx.Linear, 8, 8)
    >>> layers = [LayerSpec(nnx.Linear, 3, 8), block, block, block, nnx.relu, LayerSpec(nnx.Linear, 8, 1)]
    >>> model = PipelineModule(layers, loss_fn=lambda outputs, labels: ((outputs - labels) ** 2).mean())
    >>> model, model.stack
    (PipelineModule(Linear, 3 x Linear, relu, Linear), range(1, 4))
    >>> jax.tree.map(jnp.shape, model.init(jax.random.key(0))["stack"])
    {'bias': (3, 8), 'kernel': (3, 8, 8)}
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, *, loss_fn: Callable | None = None,
        has_aux: bool = False, partition_method: str = "parameters", activation_checkpoint_interval: int = 0,
        example_batch: Any = None, **deepspeed: Any,
    ):  # fmt: skip
        refuse_keywords("PipelineModule", deepspeed, _INSTEAD)
        self.layers, self.num_stages, self.partition_method = list(layers), num_stages, partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        if not self.layers:
            raise ConfigError("PipelineModule: layers is empty; give it at least one")
        if loss_fn is None:
            raise ConfigError("PipelineModule: loss_fn is missing; pass loss_fn=f with f(outputs, labels) -> loss")
        if activation_checkpoint_interval < 0:
            raise ConfigError(
                f"PipelineModule: activation_checkpoint_interval = {activation_checkpoint_interval} must be a number "
                "of layers, or 0 to let the config decide"
            )
        self.loss_fn, self.has_aux = loss_fn, has_aux
        self._layers: list[Layer] = []
        inputs = self._make_layers(example_batch)
        if example_batch is not None:
            self.example_batch = jax.eval_shape(lambda x: x, example_batch)
        self._check_ties()
        self.boundaries(1 if num_stages is None else num_stages)  # raises if they do not fit
        self.stack: PyTree = self._find_stack(inputs)
        self.state = frozenset(
            f"{self._place(i)}/{name}" for i, layer in enumerate(self._layers) for name in layer.state
        )
        self._offer_stack()

    def __repr__(self) -> str:
        groups = [list(group) for _, group in groupby(self._layers, lambda layer: (layer.name, layer.structure))]
        return f"PipelineModule({', '.join(f'{len(g)} x {g[0].name}' if g[1:] else g[0].name for g in groups)})"

    def boundaries(self, parts: int) -> list[int]:
        """Cut the layers into `parts`; return the boundaries [parts + 1]. A tied layer counts each time it runs."""
        names, sizes = [layer.name for layer in self._layers], [size(layer.params) for layer in self._layers]
        return partition_layers(self.partition_method, names, sizes, parts)

    def init(self, rng: jax.Array) -> PyTree:
        """Initialise the parameters; layer i's come from `fold_in(rng, i)`."""
        key = partial(jax.random.fold_in, rng)
        ends: dict[str, dict[str, PyTree]] = {LAYERS: {}, TIED: {}}
        stack = self.stack or range(0)
        for i, layer in enumerate(self._layers):
            if i not in stack:
                own, shared = layer.split(layer.init(key(i)))
                if own:
                    ends[LAYERS][str(i)] = own
                if shared:
                    ends[TIED].setdefault(layer.key or "", shared)
        ends = {name: part for name, part in ends.items() if part}
        if not stack:
            return ends
        keys, layers = [key(i) for i in stack], [self._layers[i] for i in stack]
        if all(layer is layers[0] for layer in layers):  # vmap traces one initialisation, however many layers
            return {ENDS: ends, STACK: jax.vmap(layers[0].init)(jnp.stack(keys))}
        each = [layer.init(key) for layer, key in zip(layers, keys, strict=True)]
        return {ENDS: ends, STACK: jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)}

    def loss(self, params: PyTree, batch: PyTree, rng: jax.Array | None, extra: PyTree = None) -> PyTree:
        if self.stack:
            return stack_loss(self, params, Inputs(batch, extra), rng)  # type: ignore[arg-type]
        x, new = self._walk(params, range(len(self._layers)), inputs_and_labels(batch)[0], rng)
        return add_state(self, self.end(x, batch, extra), new)

    def end(self, outputs: PyTree, batch: PyTree, extra: PyTree) -> PyTree:
        """Call the loss function."""
        given = {} if extra is None else {"extra": extra}
        refusal = "extra: loss_fn does not take it; write def loss_fn(outputs, labels, extra)"
        return self.loss_fn(outputs, inputs_and_labels(batch)[1], **extra_for(self.loss_fn, given, refusal))

    def module(self, params: PyTree, rng: jax.Array | None = None) -> Callable[[PyTree], PyTree]:
        """Return the layers as a function `inputs -> outputs`; rng None is evaluation."""
        model = self.predicting(None)

        def run(inputs: PyTree) -> PyTree:
            outputs = model.loss(params, (inputs, None), rng)
            return outputs[0] if self.state else outputs

        return run

    def predicting(self, fn: Callable | None) -> PipelineModule:
        """Return the module with `fn(outputs, labels)`, or the outputs themselves, in the place of the loss."""
        other = changed(self, loss_fn=fn or (lambda outputs, labels: outputs), has_aux=False)
        other._offer_stack()
        return other

    def layer_index(self, name: str) -> int:
        """Return the number of the layer that a leaf of `run`'s parameters belongs to."""
        parts = name.split("/")
        return self.stack.start + int(parts[1]) if parts[0] == STACK else int(parts[parts.index(LAYERS) + 1])

    def apply(self, params: PyTree, start: int, stop: int, x: PyTree, rng: jax.Array | None) -> PyTree:
        """Run x through the layers [start, stop), with the random numbers of `loss`; the stack is a list of layers."""
        return self._walk(params, range(start, stop), x, rng)[0]

    def run(self, params: PyTree, start: int, stop: int, x: PyTree, rng: jax.Array | None) -> PyTree:
        """Run the layers like `apply`; with state, return (x, new state) as `jzero.model` describes."""
        return add_state(self, *self._walk(params, range(start, stop), x, rng))

    def _walk(self, params: PyTree, layers: range, x: PyTree, rng: jax.Array | None, of: str = "") -> Outcome:
        """Run x through layers; return (x, new state).

        Args:
          params: the whole model's, with the stack as a list of layers; with `of` = ENDS, those of the ends.
          rng: the key of `params`; layer i of the ends, or of a module without a stack, draws from `fold(rng, i + 1)`.
        """
        new: dict[str, PyTree] = {}
        for i in layers:
            layer, name, weights, key = self._layers[i], self._place(i), params, rng
            if self.stack and i in self.stack:
                k = i - self.stack.start
                name, scope, weights, key = f"{STACK}/{k}", STACK, params[STACK][k], fold(rng, k + 1)
            else:
                if self.stack and not of:  # as `stack_loss` numbers the keys
                    weights, key = params[ENDS], fold(rng, 0 if i < self.stack.start else len(self.stack) + 1)
                own, tied = weights.get(LAYERS, {}), weights.get(TIED, {})
                weights, key = layer.join(own.get(str(i), {}), tied.get(layer.key, {})), fold(key, i + 1)
                scope, name = f"{LAYERS}/{i}", name.removeprefix(f"{of}/")
            with jax.named_scope(scope):
                x, state = self._layer(i, weights, x, key)
            new |= {f"{name}/{leaf}": value for leaf, value in state.items()}
        return x, new

    def _place(self, i: int) -> str:
        """Return the beginning of the names of a layer's parameters."""
        if self.stack and i in self.stack:
            return STACK
        return f"{ENDS}/{LAYERS}/{i}" if self.stack else f"{LAYERS}/{i}"

    def _layer(self, i: int, params: PyTree, x: PyTree, rng: jax.Array | None) -> Outcome:
        """Run layer i; return (x, new state), with the layer's own names."""
        layer = self._layers[i]
        with self._fits(i, x):
            y = layer.call(params, x, rng)
        return (y[0], named(y[1])) if layer.state else (y, {})

    def _offer_stack(self) -> None:
        """Give the module the functions of a model with a layer stack, if it has one."""
        if self.stack:
            self.prefix, self.block, self.suffix = self._prefix, self._block, self._suffix

    def _prefix(self, ends: PyTree, batch: PyTree, rng: jax.Array | None, extra: PyTree = None) -> PyTree:
        inputs, _ = inputs_and_labels(batch)
        return add_state(self, *self._walk(ends, range(self.stack.start), inputs, rng, ENDS))

    def _block(self, layer: PyTree, x: PyTree, rng: jax.Array | None) -> PyTree:
        first = self.stack.start
        y, new = self._layer(first, layer, x, rng)
        if signature(y) != signature(x):
            raise ConfigError(
                f"layers[{first}:{self.stack.stop}] ({self._layers[first].name}) have one structure and form "
                f"one stack, in which each layer must keep its input's shape and dtype, but {show(x)} becomes "
                f"{show(y)}: for a dtype, cast in a function before them; for a shape, pass example_batch=(inputs, "
                "labels): then they are not stacked"
            )
        return add_state(self, y, new)

    def _suffix(self, ends: PyTree, x: PyTree, batch: PyTree, rng: jax.Array | None, extra: PyTree = None) -> PyTree:
        x, new = self._walk(ends, range(self.stack.stop, len(self._layers)), x, rng, ENDS)
        return add_state(self, self.end(x, batch, extra), new)

    def _fits(self, i: int, x: PyTree) -> AbstractContextManager:
        """Name layer i, its input and the source of that input in any error inside."""
        giver = f"the output of layers[{i - 1}] ({layer_name(self.layers[i - 1])})" if i else "the batch's inputs"
        return prefixed_errors(f"layers[{i}] ({layer_name(self.layers[i])}) does not fit {show(x)}, {giver}")

    def _make_layers(self, example: PyTree) -> list[PyTree]:
        """Make `_layers`; return each layer's abstract input and the last output, all None without an example batch."""
        x, labels = (None, None) if example is None else jax.eval_shape(lambda batch: batch, inputs_and_labels(example))
        inputs = [x]
        for i, item in enumerate(self.layers):
            where = f"layers[{i}] ({layer_name(item)})"
            if is_linen(item) and example is None:
                raise ConfigError(
                    f"{where} is a Linen module, whose parameters' shapes follow from its input: pass "
                    "example_batch=(inputs, labels), arrays or ShapeDtypeStructs"
                )
            if i and same_spec(item, self.layers[i - 1]) and signature(inputs[-1]) == signature(inputs[-2]):
                layer = self._layers[-1]
            else:
                with self._fits(i, x) if is_linen(item) else prefixed_errors(where):
                    layer = make_layer(item, x)
            self._layers.append(layer)
            if example is not None:
                with self._fits(i, x), shapes_only():
                    x = jax.eval_shape(lambda params, x, i=i: self._layer(i, params, x, None)[0], layer.params, x)
            inputs.append(x)
        if example is not None and not extra_for(self.loss_fn, {}, ""):
            with prefixed_errors(f"loss_fn does not fit outputs {show(x)} and labels {show(labels)}"):
                jax.eval_shape(self.loss_fn, x, labels)
        return inputs

    def _check_ties(self) -> None:
        first: dict[str, tuple[int, PyTree]] = {}
        for i, layer in enumerate(self._layers):
            if layer.key is not None:
                shared = layer.split(layer.params)[1]
                j, other = first.setdefault(layer.key, (i, shared))
                if signature(shared) != signature(other):
                    raise ConfigError(
                        f"layers[{j}] ({self._layers[j].name}) and layers[{i}] ({layer.name}) have the key "
                        f"{layer.key!r} but cannot share {show(other)} and {show(shared)}: build them with the "
                        "same shapes, or name the attributes that they have in common in tied_weight_attr"
                    )

    def _find_stack(self, inputs: list[PyTree]) -> range | None:
        """Find the run of equal layers that keep the shape and hold at least half of the parameters, if any."""

        def structure(i: int) -> object:
            stacks = self._layers[i].structure is not None and signature(inputs[i]) == signature(inputs[i + 1])
            return self._layers[i].structure if stacks else object()

        indices = range(len(self._layers))
        runs = [list(run) for _, run in groupby(indices, structure)]
        runs = [run for run in runs if len(run) > 1]
        sizes = [len(run) * size(self._layers[run[0]].params) for run in runs]
        if not runs or not 0 < max(sizes) * 2 >= self._num_parameters():
            return None
        run = runs[sizes.index(max(sizes))]
        return range(run[0], run[-1] + 1)

    def _num_parameters(self) -> int:
        """Count all parameters, tied ones once."""
        splits = [layer.split(layer.params) for layer in self._layers]
        tied = {layer.key: shared for layer, (_, shared) in zip(self._layers, splits, strict=True)}
        return size([own for own, _ in splits]) + size(list(tied.values()))
