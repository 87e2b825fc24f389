"""Finds how a loss calls the layers of a stack, by tracing it with the layers left out.

The trace replaces the output of every layer by an input of its own. So it shows what goes from layer to layer, what all
layers get alike, and whether anything else of the layers is used: then they cannot be cut out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero._compat import needed_part
from jzero.adapters.layer_call import (
    ARRAYS,
    RANDOM,
    Call,
    Constant,
    LayerInput,
    Random,
    Static,
    Varying,
    flatten,
    handler,
)  # fmt: skip
from jzero.tree import PyTree, named


class NoCut(Exception):
    """The layers cannot be cut out of the loss; the message is the reason."""


class _Reached(BaseException):
    """Ends a forward pass at the first layer. Not an Exception, which the module might catch."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs


@contextmanager
def calls_handled(by: Callable | None) -> Iterator[None]:
    """Call `by` instead of the layers."""
    token = handler.set(by)
    try:
        yield
    finally:
        handler.reset(token)


def first_call(run: Callable[[], Any]) -> tuple[tuple, dict[str, Any]]:
    """Run the forward pass up to the first layer and return that layer's (args, kwargs)."""

    def stop(number: int | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise _Reached(args, kwargs)

    try:
        with calls_handled(stop):
            run()
    except _Reached as reached:
        return reached.args, reached.kwargs
    raise NoCut("the loss calls none of the layers")


def finish(run: Callable[[], Any], layers: int, x: LayerInput, call_layer: Callable) -> Any:
    """Run the forward pass with the stack's output `x` in the place of the layers."""
    calls = 0
    output: Any = None

    def stand_in(number: int | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        nonlocal calls, output
        calls += 1
        if calls == 1:
            shapes = output_of(call_layer, args, kwargs)
            output = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        if calls < layers:
            return output
        leaves, tree = jax.tree.flatten(output)
        for i, value in zip(x.call.outputs, x.varying, strict=True):
            leaves[i] = value
        return jax.tree.unflatten(tree, leaves)

    with calls_handled(stand_in):
        return run()


def output_of(call_layer: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute the shapes of a layer's output: `call_layer(args, kwargs)`."""
    leaves, tree = flatten(args, kwargs)
    places = [i for i, x in enumerate(leaves) if isinstance(x, ARRAYS)]

    def call(arrays: Sequence[Any]) -> Any:
        filled = [nnx.Rngs(0) if isinstance(x, RANDOM) else x for x in leaves]
        for i, x in zip(places, arrays, strict=True):
            filled[i] = x
        return call_layer(*jax.tree.unflatten(tree, filled))

    with calls_handled(None):
        return jax.eval_shape(call, [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in places])


def find_call(
    run: Callable, call_layer: Callable, name: Callable[[int], str], layers: int, ends: PyTree, layer: PyTree,
    inputs: PyTree,
) -> Call:  # fmt: skip
    """Find how the layers are called.

    Args:
      run: `run(ends, layer, inputs)` -> the loss; `layer` has the parameters that every layer's place holds.
      call_layer: `call_layer(layer, args, kwargs)` -> the output of one layer.
      name: of a layer, for messages.
      layers: how many there are.
      ends, layer, inputs: arrays or ShapeDtypeStructs.

    Raises:
      NoCut: the layers are not a chain, or the loss uses more of them.
    """
    calls: list[tuple[list[Any], Any]] = []
    found: list[Call] = []

    def outputs(ends: PyTree, layer: PyTree, inputs: PyTree) -> Any:
        args, kwargs = first_call(lambda: run(ends, layer, inputs))
        return output_of(lambda args, kwargs: call_layer(layer, args, kwargs), args, kwargs)

    output = jax.eval_shape(outputs, ends, layer, inputs)
    leaves, tree = jax.tree.flatten(output)

    def trace(ends: PyTree, layer: PyTree, ys: list[list[Any]], inputs: PyTree) -> Any:
        def record(number: int | None, args: tuple, kwargs: dict[str, Any]) -> Any:
            k = len(calls)
            if number not in (None, k) or k == layers:
                before = f"after {name(k - 1)}" if k else "first"
                raise NoCut(f"{name(number or 0)} is called {before}: call every layer once, in order")
            calls.append(flatten(args, kwargs))
            return jax.tree.unflatten(tree, ys[k])

        with calls_handled(record):
            result = run(ends, layer, inputs)
        if len(calls) < layers:
            raise NoCut(f"{name(len(calls))} is not called: call every layer once, in order")
        found.append(_classify(calls, ys, name))
        return result, [x for x in calls[0][0] if isinstance(x, ARRAYS)]  # what comes before may use the layers too

    ys = [leaves for _ in range(layers)]
    traced = jax.make_jaxpr(trace)(ends, layer, ys, inputs)
    (call,) = found
    _check_used((ends, layer, ys, inputs), needed_part(traced)[1], call, name)
    return call


def _classify(calls: list[tuple[list[Any], Any]], ys: list[list[Any]], name: Callable[[int], str]) -> Call:
    """Sort the arguments of the layers' calls."""
    first, tree = calls[0]
    for k, (_, other) in enumerate(calls):
        if other != tree:
            raise NoCut(f"{name(k)} has other arguments than {name(0)}: {other} instead of {tree}")
    arguments: list[Any] = []
    outputs: list[int] = []
    n_constants = 0
    for place, value in enumerate(first):
        others = [leaves[place] for leaves, _ in calls[1:]]
        if isinstance(value, RANDOM) and all(isinstance(other, RANDOM) for other in others):
            arguments.append(Random())
        elif not isinstance(value, ARRAYS):
            for k, other in enumerate(others, 1):
                if type(other) is not type(value) or other != value:
                    what = _argument(tree, place)
                    raise NoCut(
                        f"{what} is {value!r} for {name(0)}, but {other!r} for {name(k)}: pass the same to all, "
                        "or make it a parameter of the layer"
                    )
            arguments.append(Static(value))
        elif all(other is value for other in others):
            arguments.append(Constant(n_constants))
            n_constants += 1
        else:
            arguments.append(Varying(len(outputs)))
            outputs.append(_source(value, others, ys, name, _argument(tree, place)))
    if not outputs:
        raise NoCut("no layer gets the output of the layer before")
    return Call(tree, tuple(arguments), tuple(outputs))


def _source(value: Any, others: list[Any], ys: list[list[Any]], name: Callable[[int], str], what: str) -> int:
    """Find the leaf of the layers' outputs that goes into an argument of the next one."""
    for k, other in enumerate(others, 1):
        indices = [i for i, y in enumerate(ys[k - 1]) if other is y]
        if not indices:
            raise NoCut(
                f"{what} of {name(k)} is neither an output of {name(k - 1)} nor the array that {name(0)} gets: compute "
                "it inside the layers, or once before all of them, and leave nnx.remat to activation_checkpointing"
            )
        y = ys[k - 1][indices[0]]
        if (y.shape, y.dtype) != (value.shape, value.dtype):
            raise NoCut(
                f"{name(0)} takes {value.dtype}{list(value.shape)} as {what} and returns {y.dtype}{list(y.shape)}: "
                "every layer must keep shape and dtype; for a dtype, cast before the layers"
            )
        if k == 1:
            index = indices[0]
        elif index not in indices:
            raise NoCut(f"{what} of {name(k)} is another output than that of the layers before")
    return index


def _argument(tree: Any, place: int) -> str:
    """Name an argument: "argument 0", or its keyword."""
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, list(range(tree.num_leaves))))[0]
    keys = paths[place][0]
    return f"argument {jax.tree_util.keystr(keys[1:], simple=True, separator='.')}"


def _check_used(arguments: tuple, used: list[bool], call: Call, name: Callable[[int], str]) -> None:
    """Raise NoCut if the loss uses layers by other means than the chain of their calls."""
    _, layer, ys, _ = jax.tree.unflatten(jax.tree.structure(arguments), used)
    if outside := [leaf for leaf, is_used in named(layer).items() if is_used]:
        raise NoCut(f"the loss uses {outside[0]} of the layers outside of their calls")
    for k, leaves in enumerate(ys[:-1]):
        if any(leaves):
            hint = "; sum it up inside the layers, as in x, total = layer(x, total)" if len(leaves) > 1 else ""
            raise NoCut(f"the loss uses the output of {name(k)}, which must go into {name(k + 1)} alone{hint}")
    if rest := [i for i, is_used in enumerate(ys[-1]) if is_used and i not in call.outputs]:
        raise NoCut(f"the loss uses output {rest[0]} of {name(len(ys) - 1)}, which no layer passes on to the next")
