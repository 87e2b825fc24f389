"""How a mixture of experts runs on the devices of a group."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.mesh import EXPERT
from jzero.moe.local_experts import Tokens, mixed
from jzero.spread.value import Axes, Group, Value


def experts_on_group(
    group: Group, x: Value, chosen: Value, weights: Value, up: Value, down: Value, slots: Value | None = None,
    *, capacity: int | None, activation: Callable,
) -> Value:  # fmt: skip
    """Run the experts on shards.

    Where an axis divides the experts and the rows of the batch, tokens move to their experts and back. Where it divides
    the experts or their inner width, but not the rows, the tokens of all its devices are gathered, and each device
    computes its part of the sum. With a capacity tokens of a row must be together to have slots: of an axis that
    divides the sequence alone, each device takes a part of the slots.
    """
    _check_division(group, up, down)
    x = group.rested(x)
    of_experts, inner = up.dims[0], up.dims[-1]
    down = group.place(down, (of_experts, inner, ()))
    up = group.place(up, (of_experts, *((),) * (len(up.shape) - 2), inner))
    rows, sequence = x.dims[:2]
    exchanged = tuple(axis for axis in of_experts if axis in rows)
    of_slots = tuple(axis for axis in sequence if axis not in (*of_experts, *inner)) if capacity else ()
    apart = tuple(axis for axis in (*of_experts, *inner) if axis not in exchanged) + of_slots
    rows, sequence = (tuple(axis for axis in axes if axis not in apart) for axes in (rows, sequence))
    dims = (rows, sequence, ())
    choices = Tokens(*(group.place(v, dims).x for v in (x, chosen, weights, slots) if v is not None))
    choices = choices._replace(chosen=_own(group, choices.chosen, of_experts, exchanged, up.shape[0]))
    if capacity is not None and choices.slots is not None and of_slots:
        capacity, slots_here = _own_slots(group, choices.slots, of_slots, capacity)
        choices = choices._replace(slots=slots_here)
    y = mixed(choices, up.x, down.x, capacity, activation, exchanged, group.degree(of_experts))
    return Value(y, x.shape, dims, apart)


def _check_division(group: Group, up: Value, down: Value) -> None:
    """Raise a ConfigError for weights that `expert` divides neither by experts nor in their inner width."""
    for v, dims in ((up, range(1, len(up.shape) - 1)), (down, range(2, len(down.shape)))):
        if dim := next((d for d in dims if EXPERT in v.dims[d]), None):
            raise ConfigError(
                f"{group.ledger.line or 'jzero.experts'}: mesh.{EXPERT} divides dimension {dim} of the experts' weight "
                f"{list(v.shape)}, which would be gathered; {EXPERT}_parallel.dimensions must give dimension 0, that "
                "of the experts"
            )


def _own(group: Group, chosen: jax.Array, of_experts: Axes, exchanged: Axes, count: int) -> jax.Array:
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


def _own_slots(group: Group, slots: jax.Array, axes: Axes, capacity: int) -> tuple[int, jax.Array]:
    """Return how many of the slots this device has, and their numbers there; others are -1, or past the last."""
    part = -(-capacity // group.degree(axes))
    first = lax.axis_index(axes) * part
    return part, jnp.where(slots < capacity, slots - first, -1)
