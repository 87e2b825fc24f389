"""An array as one device of a group holds it, and the collectives that change how it lies.

Axes of the mesh may divide the dimensions of an array. Or the array may be partial over an axis: it is the sum of what
these devices hold. Otherwise it is whole, the same on every device.

All of it is differentiated by JAX as it stands. Under `jax.shard_map(check_vma=False)` the transpose of `psum` is
`psum`, of `all_gather` `psum_scatter`: the gradient of the sum, over all devices, of what each returns. So the gradient
of an array that is whole arrives in shares, one on each device, whose sum it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax

from jzero.kernels.fp8.matmul import Casts
from jzero.kernels.fp8.quantized import Quantized

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]  # for every dimension the axes that divide it, the major one first


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["shape", "dims", "partial", "weight"]
)
@dataclass(frozen=True, eq=False)
class ShardedArray:
    """An array of the group; a pytree, so that it passes through scans and checkpoints.

    Attributes:
      x: what this device holds.
      shape: of the whole array.
      dims: the axes that divide each dimension.
      partial: the axes over which it is still to be summed.
      weight: whether it is computed from parameters alone; these stay in place, and activations move.
    """

    x: Any
    shape: tuple[int, ...]
    dims: Dims
    partial: Axes = ()
    weight: bool = False

    @property
    def axes(self) -> set[str]:
        """The axes that divide it."""
        return {axis for axes in self.dims for axis in axes}

    @property
    def whole(self) -> bool:
        return not self.axes and not self.partial

    @property
    def activation(self) -> ShardedArray:
        """The same as no weight, and with nothing left to sum."""
        return ShardedArray(self.x, self.shape, self.dims)


def whole(x: Any) -> ShardedArray:
    """Wrap an array that is the same on every device."""
    shape = tuple(jnp.shape(x))
    return ShardedArray(x, shape, undivided(len(shape)))


def dequantized(v: ShardedArray) -> ShardedArray:
    """Return a weight in fp8 in the dtype that the model sees; other values as they are."""
    return replace(v, x=v.x.dequantized()) if isinstance(v.x, Quantized) else v


def undivided(ndim: int) -> Dims:
    return ((),) * ndim


class ModelGroup:
    """The devices that act as one.

    Attributes:
      degrees: axis -> its size, of the axes larger than 1.
      rest: dimension -> the axes that divide it in activations between layers.
      traced: what was moved.
      attention: how cuDNN's runs on divided sequences: "auto", "ulysses" or "ring".
      no_gradient: whether nothing takes gradients of what is computed now, so that no function needs its own.
      backward: whether a backward pass of the model's own runs now.
    """

    def __init__(self, degrees: Mapping[str, int], rest: Mapping[int, Axes] | None = None, attention: str = "auto"):
        self.attention = attention
        self.degrees = {axis: n for axis, n in degrees.items() if n > 1}
        self.rest = {d: tuple(a for a in axes if a in self.degrees) for d, axes in (rest or {}).items()}
        self.traced, self.no_gradient, self.backward = TracedMoves(), False, False
        # What several need of an array is moved, and cast, once: the array placed otherwise, and in fp8.
        self._placed: WeakKeyDictionary[ShardedArray, dict[Dims, ShardedArray]] = WeakKeyDictionary()
        self._casts: WeakKeyDictionary[ShardedArray, Casts] = WeakKeyDictionary()

    @contextlib.contextmanager
    def without_gradient(self, backward: bool = False) -> Iterator[None]:
        before = self.no_gradient, self.backward
        self.no_gradient, self.backward = True, backward
        try:
            yield
        finally:
            self.no_gradient, self.backward = before

    @property
    def size(self) -> int:
        return prod(self.degrees.values())

    def degree(self, axes: Iterable[str]) -> int:
        return prod(self.degrees[axis] for axis in axes)

    def fits(self, size: int, axes: Iterable[str]) -> bool:
        return size > 0 and size % self.degree(axes) == 0  # XLA gathers no dimension of size 0

    def local(self, shape: Sequence[int], dims: Dims) -> tuple[int, ...]:
        """Return the shape of what one device holds."""
        return tuple(n // self.degree(axes) for n, axes in zip(shape, dims, strict=True))

    def activation_dims(self, shape: Sequence[int]) -> Dims:
        """Return how an activation of this shape lies between layers; vectors of features [rows, width] lie whole."""
        dims = []
        for d, size in enumerate(shape):
            axes: Axes = ()
            for axis in self.rest.get(d, ()) if len(shape) > 2 or d == 0 else ():
                axes = (*axes, axis) if self.fits(size, (*axes, axis)) else axes
            dims.append(axes)
        return tuple(dims)

    # ------------------------------------------------------------------ from one form to another

    def in_activation_layout(self, v: ShardedArray) -> ShardedArray:
        """Return v as activations lie between layers."""
        return self.place(v, self.activation_dims(v.shape))

    def summed(self, v: ShardedArray, like: Dims = ()) -> ShardedArray:
        """Return v with nothing left to sum, scattered where `like` or the activation layout has the axis."""
        if not v.partial:
            return v
        dims = list(v.dims)
        for axis in v.partial:
            for hint in (like if len(like) == len(dims) else (), self.activation_dims(v.shape)):
                d = next((d for d, axes in enumerate(hint) if axis in axes), None)
                if d is not None and self.fits(v.shape[d], (*dims[d], axis)):
                    dims[d] = (*dims[d], axis)
                    break
        return self.place(v, tuple(dims))

    def gathered(self, v: ShardedArray, *over: int) -> ShardedArray:
        """Return v whole along these dimensions, and summed."""
        v = self.summed(v)
        return self.place(v, tuple(() if d in over else axes for d, axes in enumerate(v.dims)))

    def undivided(self, v: ShardedArray) -> ShardedArray:
        """Return v whole."""
        return self.place(v, undivided(len(v.shape)))

    def place(self, v: ShardedArray, dims: Dims) -> ShardedArray:
        """Return v divided as `dims`, with nothing left to sum. A value that several need is moved once."""
        if v.dims == dims and not v.partial:
            return v
        placed = self._placed.setdefault(v, {})
        if dims not in placed:
            placed[dims] = self._place(v, dims)
        return placed[dims]

    def casts(self, v: ShardedArray) -> Casts:
        """Return the casts of v to fp8, to which its products add theirs."""
        return self._casts.setdefault(v, {})

    def _place(self, v: ShardedArray, dims: Dims) -> ShardedArray:
        x, now = v.x, list(v.dims)
        for axis in v.partial:
            d = next((d for d, axes in enumerate(dims) if axis in axes and axes[: axes.index(axis)] == now[d]), None)
            if d is not None and self.fits(x.shape[d], (axis,)):
                x, now[d] = self._scatter_sum(x, axis, d), (*now[d], axis)
            else:
                x = self._sum(x, axis)
        for d, axes in enumerate(dims):
            x = self._exchange(x, now, d, axes, dims)
        for d, axes in enumerate(dims):
            while axes[: len(now[d])] != now[d]:
                x, now[d] = self._gather(x, now[d][-1], d), now[d][:-1]
        for d, axes in enumerate(dims):
            for axis in axes[len(now[d]) :]:
                x = self.part(x, axis, d)
        return ShardedArray(x, v.shape, dims, weight=v.weight)

    def _exchange(self, x: jax.Array, now: list[Axes], d: int, axes: Axes, dims: Dims) -> jax.Array:
        """Move axes from other dimensions to dimension d, with all-to-alls, as long as they are the minor ones."""
        while now[d] != axes and axes[: len(now[d])] == now[d]:
            axis = axes[len(now[d])]
            s = next((s for s, others in enumerate(now) if others[-1:] == (axis,) and axis not in dims[s]), None)
            if s is None:
                break
            self.traced.move("all-to-all", axis, x.shape)
            x = lax.all_to_all(x, axis, split_axis=d, concat_axis=s, tiled=True)
            now[s], now[d] = now[s][:-1], (*now[d], axis)
        return x

    def _gather(self, x: jax.Array, axis: str, d: int) -> jax.Array:
        x = lax.all_gather(x, axis, axis=d, tiled=True)
        self.traced.move("all-gather", axis, x.shape)
        return x

    def _sum(self, x: jax.Array, axis: str) -> jax.Array:
        self.traced.move("all-reduce", axis, x.shape)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return lax.psum(x, axis)
        # A psum of integers, beside those of floats, ended in a segmentation fault on CPUs (jaxlib 0.10.2).
        return lax.all_gather(x, axis).sum(0, dtype=x.dtype)

    def _scatter_sum(self, x: jax.Array, axis: str, d: int) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self.part(self._sum(x, axis), axis, d)
        self.traced.move("reduce-scatter", axis, x.shape)
        return lax.psum_scatter(x, axis, scatter_dimension=d, tiled=True)

    def part(self, x: jax.Array, axis: str, d: int) -> jax.Array:
        """Cut this device's part out of an array that all devices of the axis hold."""
        size = x.shape[d] // self.degrees[axis]
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, d)

    def share(self, v: ShardedArray, dims: Dims) -> jax.Array:
        """Return this device's share of the gradient v of an array that lies as `dims`.

        The gradient is the sum of the shares over the axes that are not in `dims`.
        """
        lacking = {axis for axis in self.degrees if all(axis not in axes for axes in dims)}
        if v.dims != dims or not lacking >= set(v.partial):
            v = self.place(v, dims)
        return v.x / self.degree(lacking - set(v.partial))


class MovedArray(NamedTuple):
    """A collective of the forward pass, in a loop counted once.

    Attributes:
      kind: as in compiled programs: "all-gather", "reduce-scatter", "all-reduce", "all-to-all".
      axis: of the mesh.
      shape: the larger one of what a device puts in and gets out.
      line: of the model's source, as "llama.py:159".
      primitive: the one that needed it.
    """

    kind: str
    axis: str
    shape: tuple[int, ...]
    line: str
    primitive: str


class Fallback(NamedTuple):
    """A primitive that ran on whole arrays although its operands were divided."""

    primitive: str
    line: str


@dataclass
class TracedMoves:
    """The moves and fallbacks of the functions that a group has traced, in order.

    Attributes:
      line, primitive: those that run now.
    """

    moves: list[MovedArray] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    line: str = ""
    primitive: str = ""

    def move(self, kind: str, axis: str, shape: tuple[int, ...]) -> None:
        self.moves.append(MovedArray(kind, axis, tuple(shape), self.line, self.primitive))

    def fall_back(self) -> None:
        self.fallbacks.append(Fallback(self.primitive, self.line))
