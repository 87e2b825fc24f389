"""The experts of a mixture: two products of each token with the weights of the experts that it goes to.

Shapes: B rows, S tokens of a row, T = B S, k experts of a token, E experts, C slots of an expert (the capacity), D
width, F inner width of an expert.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.kernels.grouped_product import grouped_dot
from jzero.mesh import EXPERT
from jzero.moe.routing import Routing, bad_call
from jzero.moe.rows import by_expert, by_slot, combine_experts, dispatch, exchange
from jzero.spread.rules import Operation
from jzero.spread.sharded_array import Axes, ModelGroup, ShardedArray


def experts(
    x: jax.Array, routing: Routing, up: jax.Array, down: jax.Array, *, activation: Callable = jax.nn.silu,
    glu: Callable | None = None, biases: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """Apply a mixture of experts to tokens.

    Without a capacity each token's rows are sorted by expert, and the products are grouped ones, of as many rows as
    each expert has: nothing is dropped (MegaBlocks, arXiv:2211.15841). With one, each expert has as many rows, empty
    or not, and the products are batched.

    The weights' expert dimension may be divided by the mesh axis `expert`, which divides the rows of the batch too:
    then tokens move to their experts, by all-to-alls. A model names these weights: `divided = {"expert": {"moe/": 0}}`.

    Without a capacity it cannot be batched by `jax.vmap`: JAX's `ragged_dot` has no rule for that. Put rows into B.

    Args:
      x: tokens [B, S, D].
      routing: from `route`.
      up: [E, D, 2, F], gates and values; or [E, D, F] without gates.
      down: [E, F, D].
      activation: of the gates, or of the values if there are none.
      glu: `glu(gates, values)`, in the place of activation(gates) * values.
      biases: of up, without its dimension D, and of down [E, D].

    Returns:
      [B, S, D] in the dtype of x: the weighted sum of the outputs of each token's experts.

    Raises:
      ConfigError: shapes that do not belong together.
    """
    if not isinstance(routing, Routing):
        raise bad_call("experts", f"routing is {type(routing).__name__}; must be what jzero.route returns")
    count, *matrix = up.shape
    up_bias, down_bias = biases or (None, None)
    fits = x.ndim == 3 and len(matrix) > 1 and matrix[1:-1] in ([], [2])
    if not fits or matrix[0] != x.shape[2] or down.shape != (count, matrix[-1], matrix[0]):
        raise bad_call(
            "experts",
            f"x {list(x.shape)}, up {list(up.shape)}, down {list(down.shape)}; must be [B, S, D], [E, D, 2, F]"
            " or [E, D, F], and [E, F, D]",
        )
    if routing.experts.shape[:2] != x.shape[:2] or routing.scores.shape[-1] != count:
        raise bad_call(
            "experts",
            f"the routing is of tokens {list(routing.experts.shape[:2])} and {routing.scores.shape[-1]} "
            f"experts, x has tokens {list(x.shape[:2])} and up {count} experts",
        )
    if biases is not None and (biases[0].shape, biases[1].shape) != ((count, *matrix[1:]), (count, matrix[0])):
        raise bad_call(
            "experts",
            f"biases {list(biases[0].shape)}, {list(biases[1].shape)}; must be {[count, *matrix[1:]]} and "
            f"{[count, matrix[0]]}",
        )
    tokens = Tokens(x, routing.experts, routing.weights, routing.slots)
    both = (glu or _Gated(activation)) if up.ndim == 4 else activation
    y = mixture(tokens, Weights(up, down, up_bias), capacity=routing.capacity, activation=both)
    return y if down_bias is None else y + _weighted_bias(routing, down_bias).astype(y.dtype)


@dataclass(frozen=True)
class _Gated:
    """The product of activated gates and values; equal for equal activations, so that layers have one program."""

    activation: Callable

    def __call__(self, gate: jax.Array, value: jax.Array) -> jax.Array:
        return self.activation(gate) * value


def _weighted_bias(routing: Routing, bias: jax.Array) -> jax.Array:
    """Sum the biases of each token's experts, as one matmul with all of them: [B, S, D]."""
    weights = routing.weights
    if routing.slots is not None and routing.capacity is not None:
        weights = jnp.where(routing.slots < routing.capacity, weights, 0)
    return jnp.einsum("bske,bsk,ed->bsd", jax.nn.one_hot(routing.experts, len(bias)), weights, bias)


# The scope of products of padded rows: in "one_row_of_4" every fourth row holds a token, on average.
OCCUPIED = "one_row_of_"


X = TypeVar("X", jax.Array, ShardedArray)


class Tokens(NamedTuple, Generic[X]):
    """Tokens x [B, S, D], and as in `Routing` the experts `chosen` [B, S, k], `weights` and `slots`.

    A choice of an expert that is not among those of this call counts nothing.
    """

    x: X
    chosen: X
    weights: X
    slots: X | None = None


class Weights(NamedTuple, Generic[X]):
    """Experts up [E, D, 2, F] or [E, D, F] with a bias [E, 2, F] or [E, F], if they have one, and down [E, F, D]."""

    up: X
    down: X
    up_bias: X | None = None


def mixed(
    tokens: Tokens[jax.Array], weights: Weights[jax.Array], capacity: int | None, activation: Callable,
    axes: tuple[str, ...] = (), parts: int = 1,
) -> jax.Array:  # fmt: skip
    """Sum the outputs of each token's experts: [B, S, D].

    Args:
      tokens: the experts that they chose are 0 to n E - 1, in the order of the n devices along `axes`.
      weights: of this device's experts.
      capacity: tokens of a row that an expert takes; None: all.
      axes: the mesh axes along which devices with other tokens have other experts.
      parts: the devices among which the experts are divided. Without a capacity there is a row for each choice that
        may come to this device, but only one in `parts` comes, if the experts are equally popular.
    """
    rows, (x, chosen, shares) = len(tokens.x), (a.reshape(-1, a.shape[-1]) for a in tokens[:3])
    count = len(weights.up) * (lax.axis_size(axes) if axes else 1)
    if capacity is None:
        plan, sizes = by_expert(chosen, count)
        x, sizes, back = exchange(dispatch(x, plan), sizes, axes)
        with jax.named_scope(f"{OCCUPIED}{parts}") if parts > 1 else contextlib.nullcontext():
            y = _products(partial(grouped_dot, sizes=sizes), x, weights, activation, sizes)
        y = back(y)
    else:
        size = rows * capacity  # of one expert
        plan = by_slot(_row_of_slot(tokens, capacity), count * size)
        x = dispatch(x, plan).reshape(count, size, -1)
        # [n E, C B, D] -> [E, n C B, D]: to the device that has the expert
        if axes:
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=1, tiled=True)
        y = _products(partial(jnp.einsum, "emd,edf->emf"), x, weights, activation)
        if axes:
            y = lax.all_to_all(y, axes, split_axis=1, concat_axis=0, tiled=True)
        y = y.reshape(count * size, -1)
    return combine_experts(y, shares, plan).reshape(tokens.x.shape)


def _row_of_slot(tokens: Tokens[jax.Array], capacity: int) -> jax.Array:
    """Number the rows: expert, row of the batch, slot; -1: dropped, or not an expert of this call. [T, k]."""
    rows, _, k = tokens.chosen.shape
    assert tokens.slots is not None  # noqa: S101  # `route` makes them with a capacity
    row = (tokens.chosen * rows + jnp.arange(rows)[:, None, None]) * capacity + tokens.slots
    taken = (tokens.slots >= 0) & (tokens.slots < capacity)
    return jnp.where(taken, row, -1).reshape(-1, k)


def _products(
    product: Callable, x: jax.Array, weights: Weights[jax.Array], activation: Callable, sizes: jax.Array | None = None
) -> jax.Array:
    """Apply the two products to rows [..., D]; `sizes`: the rows of each expert, unless all have as many."""
    up, down = weights.up.astype(x.dtype), weights.down.astype(x.dtype)
    # Gates and values in one product, [E, D, 2 F].
    h = product(x, up.reshape(*up.shape[:2], -1))
    if weights.up_bias is not None:
        bias = weights.up_bias.reshape(len(up), -1).astype(x.dtype)
        h += bias[:, None] if sizes is None else _bias_of_rows(bias, sizes, len(h))
    h = activation(*jnp.split(h, 2, axis=-1)) if up.ndim == 4 else activation(h)
    return product(h, down)


def _bias_of_rows(bias: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """Repeat each expert's bias [E, F] for its rows [M, F], by a matmul: the gradient of a lookup is a slow scatter."""
    ends = jnp.cumsum(sizes)
    at = jnp.arange(rows)[:, None]
    return ((at >= ends - sizes) & (at < ends)).astype(bias.dtype) @ bias


def experts_on_group(
    group: ModelGroup, tokens: Tokens[ShardedArray], weights: Weights[ShardedArray], *, capacity: int | None,
    activation: Callable,
) -> ShardedArray:  # fmt: skip
    """Run the experts on shards.

    Where an axis divides the experts and the rows of the batch, tokens move to their experts and back. Where it divides
    the experts or their inner width, but not the rows, the tokens of all its devices are gathered, and each device
    computes its part of the sum. With a capacity tokens of a row must be together to have slots: of an axis that
    divides the sequence alone, each device takes a part of the slots.
    """
    up, down, up_bias = weights
    _check_division(group, up, down)
    x = group.in_activation_layout(tokens.x)
    of_experts, inner = up.dims[0], up.dims[-1]
    down = group.place(down, (of_experts, inner, ()))
    up = group.place(up, (of_experts, *((),) * (len(up.shape) - 2), inner))
    if up_bias is not None:
        up_bias = group.place(up_bias, (of_experts, *((),) * (len(up.shape) - 3), inner))
    rows, sequence = x.dims[:2]
    exchanged = tuple(axis for axis in of_experts if axis in rows)
    of_slots = tuple(axis for axis in sequence if axis not in (*of_experts, *inner)) if capacity else ()
    apart = tuple(axis for axis in (*of_experts, *inner) if axis not in exchanged) + of_slots
    rows, sequence = (tuple(axis for axis in axes if axis not in apart) for axes in (rows, sequence))
    dims = (rows, sequence, ())
    here = Tokens(*(group.place(v, dims).x for v in (x, *tokens[1:]) if v is not None))
    here = here._replace(chosen=_own(group, here.chosen, of_experts, exchanged, up.shape[0]))
    if capacity is not None and here.slots is not None and of_slots:
        part = -(-capacity // group.degree(of_slots))  # of the slots; others are negative, or past the last
        slots = jnp.where(here.slots < capacity, here.slots - lax.axis_index(of_slots) * part, -1)
        capacity, here = part, here._replace(slots=slots)
    own = Weights(up.x, down.x, None if up_bias is None else up_bias.x)
    y = mixed(here, own, capacity, activation, exchanged, group.degree(of_experts))
    return ShardedArray(y, x.shape, dims, apart)


def _check_division(group: ModelGroup, up: ShardedArray, down: ShardedArray) -> None:
    """Raise a ConfigError for weights that `expert` divides neither by experts nor in their inner width."""
    for v, dims in ((up, range(1, len(up.shape) - 1)), (down, range(2, len(down.shape)))):
        if dim := next((d for d in dims if EXPERT in v.dims[d]), None):
            raise ConfigError(
                f"{group.traced.line or 'jzero.experts'}: mesh.{EXPERT} divides dimension {dim} of the experts' weight "
                f"{list(v.shape)}, which would be gathered; {EXPERT}_parallel.dimensions must give dimension 0, that "
                "of the experts"
            )


def _own(group: ModelGroup, chosen: jax.Array, of_experts: Axes, exchanged: Axes, count: int) -> jax.Array:
    """Number the experts along `exchanged`, in the order of the devices; others become `count`, which is none."""
    here = count // group.degree(of_experts)
    block, number, scale, mine = chosen // here, jnp.zeros_like(chosen), 1, jnp.ones(chosen.shape, bool)
    for axis in reversed(of_experts):
        block, at = jnp.divmod(block, group.degrees[axis])
        if axis in exchanged:
            number, scale = number + at * scale, scale * group.degrees[axis]
        else:
            mine &= at == lax.axis_index(axis)
    return jnp.where(mine, number * here + chosen % here, count)


mixture = Operation(mixed, experts_on_group, "experts")
