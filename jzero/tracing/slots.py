"""Slots of buffers, in which arrays wait; elementwise kernels read and write theirs in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jzero._compat import is_constant, memory_view
from jzero.kernels.fusion.parts import MAP_PARTS, map_parts_in_slot
from jzero.kernels.trace import Equation, Read, Variable
from jzero.tracing.equations import Equations, run_equation
from jzero.tracing.source_lines import source_of
from jzero.tree import PyTree, replaced

Arrays = list[jax.Array]
Index = jax.Array | int
_VIEWS = ("reshape", "squeeze")
HOST_SPACE, DEVICE_SPACE = jax.memory.Space.Host, jax.memory.Space.Device


def make_slots(slots: int, shapes: PyTree, on_host: bool = False) -> PyTree:
    """Make slots for arrays of these shapes. Floats stay uninitialised: a value read too early is dropped.

    Args:
      shapes: ShapeDtypeStructs, or types as from `jax.typeof`: those of host memory get their slots there.
      on_host: put the slots of all floats in host memory.
    """

    def one(x: PyTree) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        if (on_host and floating) or getattr(x, "memory_space", None) == HOST_SPACE:
            # A view of constants: XLA allocates the buffer on the host and never fills it. JAX's scans do the same.
            return memory_view(jnp.zeros((slots, *x.shape), x.dtype), HOST_SPACE)
        return (lax.empty if floating else jnp.zeros)((slots, *x.shape), x.dtype)

    return jax.tree.map(one, shapes)


def write_slot(buffer: PyTree, slot: jax.Array | int, x: PyTree) -> PyTree:
    """Write x into a slot, and move it to the memory of the buffer first; where x has None, the buffer stays."""

    def one(b: jax.Array, x: jax.Array | None) -> jax.Array:
        return b if x is None else lax.dynamic_update_index_in_dim(b, _to(jax.typeof(b).memory_space, x), slot, 0)

    return jax.tree.map(one, buffer, x)


def read_slot(buffer: PyTree, slot: jax.Array | int) -> PyTree:
    """Read a slot; the result stays in the memory of the buffer."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)


def copied_to_device(x: PyTree) -> PyTree:
    """Copy the arrays of a tree from host memory to the device."""
    return jax.tree.map(partial(_to, DEVICE_SPACE), x)


def _to(space: object, x: jax.Array) -> jax.Array:
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)  # type: ignore[arg-type]


# ------------------------------------------------------------------ elementwise kernels


def run_into_slot(
    program: Equations, values: Sequence[jax.Array], waiting: Sequence[Variable], stash: Arrays, slot: Index
) -> tuple[Read[jax.Array], Arrays]:
    """Run a program whose variables `waiting` go to a slot of the stash; return (how to read others, the new stash).

    What an elementwise kernel reads of them it copies into the slot on its way.
    """
    stash, copied = list(stash), set[int]()

    def copy(eqn: Equation, xs: Arrays, there: dict[int, int]) -> Sequence[jax.Array]:
        nonlocal stash
        new = {n: i for i, n in there.items() if n not in copied}  # of two views of one, one
        found, buffers = map_parts_in_slot(eqn, xs, slot, {}, {i: stash[n] for n, i in new.items()})
        stash = replaced(stash, list(new), buffers)
        copied.update(new)
        return found

    read = program.run(program.eqns, program.inputs, values, _at_kernels(program, waiting, stash, copy))
    kept = [None if n in copied else x for n, x in enumerate(read(waiting))]
    return read, write_slot(stash, slot, kept)


def run_from_slot(f: Callable, stash: Arrays, slot: Index) -> PyTree:
    """Compute `f(arrays of the slot)`; elementwise kernels read them where they are."""
    kept = read_slot(stash, slot)
    closed, shape = jax.make_jaxpr(f, return_shape=True)(kept)
    program = Equations(closed)

    def read_there(eqn: Equation, xs: Arrays, there: dict[int, int]) -> Sequence[jax.Array]:
        return map_parts_in_slot(eqn, xs, slot, {i: stash[n] for i, n in there.items()}, {})[0]

    read = program.run(program.eqns, program.inputs, kept, _at_kernels(program, program.inputs, stash, read_there))
    return jax.tree.unflatten(jax.tree.structure(shape), read(program.outputs))


def _at_kernels(program: Equations, waiting: Sequence[Variable], stash: Arrays, run: Callable) -> Callable:
    """Make the function that runs an equation.

    A kernel with operands that are views of what waits on the device runs by `run(equation, operands, {operand: number
    in waiting})`.
    """
    origin: dict[Variable, Variable] = {}
    for eqn in program.eqns:
        if eqn.primitive.name in _VIEWS and not is_constant(v := eqn.invars[0]):
            origin[eqn.outvars[0]] = origin.get(v, v)
    on_device = [n for n, b in enumerate(stash) if jax.typeof(b).memory_space == DEVICE_SPACE]
    numbers = {origin.get(waiting[n], waiting[n]): n for n in on_device if not is_constant(waiting[n])}

    def bind(eqn: Equation, read: Read[jax.Array]) -> Sequence[jax.Array]:
        there: dict[int, int] = {}
        if eqn.primitive.name == MAP_PARTS:
            roots = [None if is_constant(v) else origin.get(v, v) for v in eqn.invars]
            there = {i: numbers[v] for i, v in enumerate(roots) if v in numbers and eqn.invars[i].aval.shape[0] > 1}
        if not there:
            return run_equation(eqn, read)
        with source_of(eqn), eqn.ctx.manager:
            return run(eqn, read(eqn.invars), there)

    return bind
