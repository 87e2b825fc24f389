"""The call of a layer in a stack, and how a loss makes it: found by tracing the loss with the layers left out.

The trace replaces the output of every layer by an input of its own. So it shows what goes from layer to layer, what all
layers get alike, and whether anything else of the layers is used: then they cannot be cut out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import PyTreeDef

from jzero._compat import needed_part
from jzero.tree import PyTree, named

Arguments = tuple[tuple, dict[str, Any]]  # (args, kwargs) of a call of a layer
Handler = Callable[[int | None, Arguments], PyTree]
# Called with a layer's arguments instead of it; with its number, or None if only the order of the calls tells it.
handler: ContextVar[Handler | None] = ContextVar("handler", default=None)

Array = jax.Array | np.ndarray | np.generic
ARRAYS = (jax.Array, np.ndarray, np.generic)
RANDOM = (nnx.Rngs, nnx.RngStream)


def flatten(arguments: Arguments) -> tuple[list[Any], PyTreeDef]:
    """Flatten a call's arguments; generators of random keys are leaves."""
    return jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, RANDOM))


@dataclass(frozen=True)
class LayerCall:
    """The call of every layer of a stack: `tree`, the structure of its arguments, and its leaves' numbers by kind.

    Attributes:
      varying: arguments that the layer before returns.
      outputs: for each of them, the leaf of a layer's output that the next layer gets.
      constant: arrays that every layer gets alike, such as a mask.
      random: generators of random keys. Every layer gets its own instead, made from its key.
      static: (number, value) of arguments that are no arrays.
    """

    tree: PyTreeDef
    varying: tuple[int, ...]
    outputs: tuple[int, ...]
    constant: tuple[int, ...]
    random: tuple[int, ...]
    static: tuple[tuple[int, Any], ...]

    def pack(self, arguments: Arguments) -> LayerInput:
        """Sort the arguments of a call."""
        leaves, _ = flatten(arguments)
        varying, constant = ([jnp.asarray(leaves[i]) for i in places] for places in (self.varying, self.constant))
        return LayerInput(varying, constant, self)


@partial(jax.tree_util.register_dataclass, data_fields=["varying", "constant"], meta_fields=["call"])
@dataclass(frozen=True)
class LayerInput:
    """The `x` of a model's stack: the arguments of the next layer."""

    varying: list[jax.Array]
    constant: list[jax.Array]
    call: LayerCall

    def arguments(self, rng: jax.Array | None) -> Arguments:
        """Return the arguments; generators draw from `rng`."""
        leaves: dict[int, Any] = dict(self.call.static)
        leaves |= zip(self.call.varying, self.varying, strict=True)
        leaves |= zip(self.call.constant, self.constant, strict=True)
        leaves |= {i: nnx.Rngs(jax.random.key(0) if rng is None else rng) for i in self.call.random}
        return jax.tree.unflatten(self.call.tree, [leaves[i] for i in range(len(leaves))])

    def after(self, output: PyTree) -> LayerInput:
        """Return the arguments of the next layer, from a layer's output."""
        leaves = jax.tree.leaves(output)
        return LayerInput([leaves[i] for i in self.call.outputs], self.constant, self.call)


class NoCut(Exception):
    """The layers cannot be cut out of the loss; the message is the reason."""


class _Reached(BaseException):
    """Ends a forward pass at the first layer. Not an Exception, which the module might catch."""


@contextmanager
def calls_handled(by: Handler | None) -> Iterator[None]:
    """Call `by` instead of the layers."""
    token = handler.set(by)
    try:
        yield
    finally:
        handler.reset(token)


@contextmanager
def scans_unrolled(layers: int) -> Iterator[None]:
    """Run `lax.scan` as a Python loop up to the last layer, so that the handler gets the values between the layers."""
    handle, calls, scope = handler.get(), count(1), ExitStack()

    def counted(number: int | None, arguments: Arguments) -> PyTree:
        if next(calls) == layers:
            scope.close()
        return handle(number, arguments)  # type: ignore[misc]

    scope.enter_context(jax.disable_jit())
    with scope, calls_handled(counted):
        yield


def first_call(run: Callable[[], PyTree]) -> Arguments:
    """Run the forward pass up to the first layer and return that layer's arguments."""
    reached: list[Arguments] = []

    def stop(number: int | None, arguments: Arguments) -> NoReturn:
        reached.append(arguments)
        raise _Reached

    try:
        with calls_handled(stop):
            run()
    except _Reached:
        return reached[0]
    raise NoCut("the loss calls none of the layers")


def finish(run: Callable[[], PyTree], layers: int, x: LayerInput, call_layer: Callable[[Arguments], PyTree]) -> Any:
    """Run the forward pass with the stack's output `x` in the place of the layers."""
    outputs: list[PyTree] = []

    def stand_in(number: int | None, arguments: Arguments) -> PyTree:
        if not outputs:
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), output_of(call_layer, arguments))
            leaves, tree = jax.tree.flatten(zeros)
            last = dict(enumerate(leaves)) | dict(zip(x.call.outputs, x.varying, strict=True))
            outputs.extend([jax.tree.unflatten(tree, list(last.values())), *[zeros] * (layers - 1)])  # the last first
        return outputs.pop()

    with calls_handled(stand_in):
        return run()


def output_of(call_layer: Callable[[Arguments], PyTree], arguments: Arguments) -> PyTree:
    """Compute the shapes of a layer's output."""
    leaves, tree = flatten(arguments)
    shapes = {i: jax.ShapeDtypeStruct(x.shape, x.dtype) for i, x in enumerate(leaves) if isinstance(x, ARRAYS)}

    def call(arrays: dict[int, jax.Array]) -> PyTree:
        own = [nnx.Rngs(0) if isinstance(x, RANDOM) else arrays.get(i, x) for i, x in enumerate(leaves)]
        return call_layer(jax.tree.unflatten(tree, own))

    with calls_handled(None):
        return jax.eval_shape(call, shapes)


def find_call(
    run: Callable, call_layer: Callable, name_of: Callable[[int], str], layers: int, operands: tuple[PyTree, ...]
) -> LayerCall:
    """Find how the layers are called.

    Args:
      run: `run(ends, layer, *inputs)` -> the loss; `layer` has the parameters that every layer's place holds.
      call_layer: `call_layer(layer, arguments)` -> the output of one layer.
      name_of: the name of a layer, for messages.
      layers: how many there are.
      operands: of `run`, arrays or ShapeDtypeStructs.

    Raises:
      NoCut: the layers are not a chain, or the loss uses more of them.
    """
    calls: list[tuple[list[Any], PyTreeDef]] = []
    found: list[LayerCall] = []

    def outputs(*operands: PyTree) -> PyTree:
        arguments = first_call(lambda: run(*operands))
        return output_of(partial(call_layer, operands[1]), arguments)

    leaves, tree = jax.tree.flatten(jax.eval_shape(outputs, *operands))

    def trace(ys: list[list[jax.Array]], *operands: PyTree) -> PyTree:
        def record(number: int | None, arguments: Arguments) -> PyTree:
            k = len(calls)
            if number not in (None, k) or k == layers:
                before = f"after {name_of(k - 1)}" if k else "first"
                raise NoCut(f"{name_of(number or 0)} is called {before}: call every layer once, in order")
            calls.append(flatten(arguments))
            return jax.tree.unflatten(tree, ys[k])

        with calls_handled(record):
            result = run(*operands)
        if len(calls) < layers:
            raise NoCut(f"{name_of(len(calls))} is not called: call every layer once, in order")
        found.append(_classify(calls, ys, name_of))
        return result, [x for x in calls[0][0] if isinstance(x, ARRAYS)]  # what comes before may use the layers too

    inputs = [leaves] * layers, *operands
    _, used = needed_part(jax.make_jaxpr(trace)(*inputs))
    ys_used, _, layer_used, *_ = jax.tree.unflatten(jax.tree.structure(inputs), used)
    _check_used(layer_used, ys_used, found[0], name_of)
    return found[0]


def _classify(
    calls: list[tuple[list[Any], PyTreeDef]], ys: list[list[jax.Array]], name_of: Callable[[int], str]
) -> LayerCall:
    """Sort the arguments of the layers' calls."""
    _, tree = calls[0]
    for k, (_, other) in enumerate(calls):
        if other != tree:
            raise NoCut(f"{name_of(k)} has other arguments than {name_of(0)}: {other} instead of {tree}")
    outputs: dict[int, int] = {}
    constant, random, static = [], [], []
    for place, (value, *others) in enumerate(zip(*(leaves for leaves, _ in calls), strict=True)):
        if all(isinstance(x, RANDOM) for x in (value, *others)):
            random.append(place)
        elif not isinstance(value, ARRAYS):
            for k, other in enumerate(others, 1):
                if type(other) is not type(value) or other != value:
                    what = f"{_argument(tree, place)} is {value!r} for {name_of(0)}, but {other!r} for {name_of(k)}"
                    raise NoCut(f"{what}: pass the same to all, or make it a parameter of the layer")
            static.append((place, value))
        elif all(other is value for other in others):
            constant.append(place)
        else:
            outputs[place] = _source(value, others, ys, name_of, _argument(tree, place))
    if not outputs:
        raise NoCut("no layer gets the output of the layer before")
    return LayerCall(tree, (*outputs,), (*outputs.values(),), tuple(constant), tuple(random), tuple(static))


def _source(
    value: Array, others: list[Array], ys: list[list[jax.Array]], name_of: Callable[[int], str], what: str
) -> int:
    """Find the leaf of the layers' outputs that goes into an argument of the next one."""
    sources = []
    for k, other in enumerate(others, 1):
        index = next((i for i, y in enumerate(ys[k - 1]) if other is y), None)
        if index is None:
            raise NoCut(
                f"{what} of {name_of(k)} is neither an output of {name_of(k - 1)} nor the array that {name_of(0)} "
                "gets: compute it inside the layers, or once before all of them, and leave nnx.remat to "
                "activation_checkpointing"
            )
        if (other.shape, other.dtype) != (value.shape, value.dtype):
            returned = f"{other.dtype}{list(other.shape)}"
            raise NoCut(
                f"{name_of(0)} takes {value.dtype}{list(value.shape)} as {what} and returns {returned}: "
                "every layer must keep shape and dtype; for a dtype, cast before the layers"
            )
        sources.append(index)
        if index != sources[0]:
            raise NoCut(f"{what} of {name_of(k)} is another output than that of the layers before")
    return sources[0]


def _argument(tree: PyTreeDef, place: int) -> str:
    """Name an argument: "argument 0", or its keyword."""
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, list(range(tree.num_leaves))))[0]
    keys = paths[place][0]
    return f"argument {jax.tree_util.keystr(keys[1:], simple=True, separator='.')}"


def _check_used(layer: PyTree, ys: list[list[bool]], call: LayerCall, name_of: Callable[[int], str]) -> None:
    """Raise NoCut if the loss uses layers by other means than the chain of their calls.

    Args:
      layer, ys: whether it uses the layer's parameters and the outputs of each layer.
    """
    if outside := [leaf for leaf, is_used in named(layer).items() if is_used]:
        raise NoCut(f"the loss uses {outside[0]} of the layers outside of their calls")
    for k, leaves in enumerate(ys[:-1]):
        if any(leaves):
            hint = "; sum it up inside the layers, as in x, total = layer(x, total)" if len(leaves) > 1 else ""
            raise NoCut(f"the loss uses the output of {name_of(k)}, which must go into {name_of(k + 1)} alone{hint}")
    if rest := [i for i, is_used in enumerate(ys[-1]) if is_used and i not in call.outputs]:
        raise NoCut(f"the loss uses output {rest[0]} of {name_of(len(ys) - 1)}, which no layer passes on to the next")
