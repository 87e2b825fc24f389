"""The layer stack: the form of its parameters inside the step, and how a batch runs through it.

Between steps a stacked parameter is one array with a leading layer axis. Inside the step it takes one of several forms:
scanned (as it is), unrolled (a list of layers), or cut into the chunks of a pipeline stage. A `StackView` is a form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jzero.config import Config
from jzero.errors import ConfigError
from jzero.layout import storage
from jzero.layout.sharding import ParamLayout, stack_length
from jzero.model import ENDS, STACK, fold
from jzero.passes.remat import Block, Remat
from jzero.precision import Precision
from jzero.tree import PyTree, leading_dim, replaced

# Unrolling saves 5-18 % of the step time on GPUs; past this many layers its compile time is no longer small: XLA takes
# about 0.7 CPU seconds for the forward and backward pass of one (experiments/benchmarks).
UNROLL_LIMIT = 48
# Gradients of at most so many elements of a layer are stacked before anyone reads them. XLA reads larger ones layer by
# layer, where they are; for small ones the kernels cost more than the copy (1,000 of the 3,700 in a step of LoRA).
SMALL = 2**20


@dataclass(frozen=True)
class StackView:
    """The form in which the step uses the parameters, and the conversions to and from it.

    Attributes:
      layouts: the parameters' layouts in that form.
      split: local parameters, as between steps -> that form.
      merge: the inverse, for gradients.
      layer_axis: whether stacked leaves still have a leading axis in that form.
    """

    layouts: PyTree
    split: Callable[[PyTree], PyTree] = lambda params: params
    merge: Callable[[PyTree], PyTree] = lambda gradients: gradients
    layer_axis: bool = True

    def per_layer(self, f: Callable) -> Callable:
        """Map `f(layout, *leaves)` over the leading axis that stacked leaves have here."""

        def each(layout: ParamLayout, *xs: Any) -> Any:
            one = partial(f, layout)
            return jax.vmap(one)(*xs) if layout.stacked and self.layer_axis else one(*xs)

        return each


def scanned(layouts: PyTree) -> StackView:
    """View the parameters as they are: a stack with its layer axis, or a model without a stack."""
    return StackView(layouts)


def unrolled(layouts: PyTree) -> StackView:
    """View the stack as a list of layers, so that its gradients come out layer by layer too."""
    length = stack_length(layouts)

    def split(params: PyTree) -> PyTree:
        layers = [jax.tree.map(lambda w, i=i: w[i], params[STACK]) for i in range(length)]  # type: ignore[misc]
        return {ENDS: params[ENDS], STACK: layers}

    def stacked(*gradients: jax.Array) -> jax.Array:
        whole = jnp.stack(gradients)
        return jax.lax.optimization_barrier(whole) if gradients[0].size <= SMALL else whole

    def merge(gradients: PyTree) -> PyTree:
        return {ENDS: gradients[ENDS], STACK: jax.tree.map(stacked, *gradients[STACK])}

    return StackView({ENDS: layouts[ENDS], STACK: [layouts[STACK]] * length}, split, merge, layer_axis=False)


def unrolls(config: Config, layouts: PyTree, remat: Remat) -> bool:
    """Return whether the stack is unrolled: `stack.unroll`; by default up to `UNROLL_LIMIT` layers, with exceptions."""
    # Unrolled, XLA keeps a copy of every layer's weights or activations on the device between the forward and the
    # backward pass, which is what keeping them in host memory was to avoid (an H100, experiments/benchmarks).
    weights = any(layout.on_host.in_use for layout in jax.tree.leaves(layouts[STACK]))
    on_host = {"zero_optimization.offload_param": weights, "activation_checkpointing.cpu_checkpointing": remat.offload}
    for key, asked in on_host.items():
        if asked and config.stack.unroll is True:
            raise ConfigError(
                f"stack.unroll = true with {key}: unrolled, XLA keeps what is on the host on the device too; remove one"
            )
    if config.stack.unroll != "auto" or any(on_host.values()):
        return config.stack.unroll is True
    # XLA copies a layer's weights out of the stack, and unrolled, all copies exist at once. Trained weights are cast to
    # the compute dtype anyway; of frozen ones this is a second copy. With little else in memory, as under full remat,
    # LoRA on Llama 8B needs 28 GiB instead of 18. With more activations it costs nothing, and a scan is much slower.
    sizes = [(prod(layout.shape), layout.trainable) for layout in jax.tree.leaves(layouts[STACK])]
    mostly_frozen = 2 * sum(size for size, trainable in sizes if trainable) < sum(size for size, _ in sizes)
    return stack_length(layouts) <= UNROLL_LIMIT and not (mostly_frozen and remat.kind == "full")


def map_present(f: Callable, layouts: PyTree, *trees: PyTree) -> PyTree:
    """Map `f(layout, *leaves)`; None where a tree has None."""
    return jax.tree.map(lambda layout, *xs: None if xs[0] is None else f(layout, *xs), layouts, *trees)


def fetch_params(layouts: PyTree, pair: tuple[PyTree, PyTree], precision: Precision) -> PyTree:
    """Fetch the tree of whole weights from trees (diff, nondiff), where they are used; see `storage.fetch_weight`."""
    return jax.tree.map(partial(storage.fetch_weight, precision=precision), layouts, *pair)


def run_stack(layer: Block, weights: Any, x: Any, rng: jax.Array | None) -> tuple[Any, Any]:
    """Run x through every layer: `layer(weights_l, x, key_l) -> (x, new state_l)`; return (x, new state of all).

    `weights` is a list with one pair (trained, other) of trees per layer, for `ordered_backward` (unrolled), or a tree
    whose leaves have a leading layer axis (scanned). The keys are those of `model.stack_loss`: layer l draws from
    `fold(rng, l + 1)`.
    """
    if isinstance(weights, list):
        states, trained = [], weights[0][0]
        for index, (_, others) in enumerate(weights):
            following = weights[index + 1][0] if index + 1 < len(weights) else ()
            (x, trained), state = layer((trained, others), (x, following), fold(rng, index + 1))
            states.append(state)
        return x, states

    def body(x: Any, item: Any) -> tuple[Any, Any]:
        index, one = item
        return layer(one, x, fold(rng, index + 1))

    return jax.lax.scan(body, x, (jnp.arange(leading_dim(weights)), weights))


def ordered_backward(block: Block) -> Block:
    """Make a layer `run(weights, (x, following), key) -> ((y, following), new state)` that runs backward in its turn.

    `following` are the trained weights of the layer above, as stored. All gradients of this layer's weights are
    computed before the layer below starts its backward pass, while the gradients of `following` are reduced.
    """

    def run(weights: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
        # XLA would compute the gradients of all layers' inputs first, since the layer below waits for no gradient of a
        # weight. It would keep the operands of these products, or their results, to the end of the step, where the
        # collectives that follow have nothing to hide behind: 52 ms of a step of 7.2B on two H200s.
        weights, (x, following) = joint_backward((weights, inputs))
        y, new = block(weights, x, key)
        return (y, following), new

    return run


@jax.custom_vjp
def joint_backward(tree: PyTree) -> PyTree:
    """Return the tree. The backward pass computes the gradients of all its leaves before it uses one of them."""
    return tree


def _forward(tree: Any) -> tuple[Any, None]:
    return jax.tree.map(lambda primal: primal.value, tree), None


def _backward(_: None, gradients: Any) -> Any:
    leaves, treedef = jax.tree.flatten(gradients)
    # Gradients that are zero (`SymbolicZero`) or of integers (float0) are no arrays that a barrier takes.
    there = [i for i, g in enumerate(leaves) if not isinstance(g, SymbolicZero) and g.dtype != jax.dtypes.float0]
    now = jax.lax.optimization_barrier([leaves[i] for i in there])
    return (jax.tree.unflatten(treedef, replaced([None] * len(leaves), there, now)),)


joint_backward.defvjp(_forward, _backward, symbolic_zeros=True)
