"""Functions of long sequences, tile by tile: what they need in between exists for one tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.tree import PyTree

CUT = "cut_in_tiles_"  # the scope of the cut, as "cut_in_tiles_4_of_1024"


def tiled(f: Callable[[PyTree], PyTree], x: PyTree, tiles: int, *, axis: int = 1) -> PyTree:
    """Compute f(x) for one tile of the sequence after another, forward and backward.

    The backward pass computes each tile of f again. So of all that f needs in between, logits or a wide feed-forward
    layer, one tile exists at a time (ALST, Bekman et al., arXiv:2506.13996). Gradients of what f closes over, such as
    weights, are added in float32.

    A tile has every tiles-th position. So an axis of the mesh that divides the sequence divides the tiles alike, and
    nothing is moved; `S / tiles` should be a multiple of its size.

    Args:
      f: treats each position of the sequence by itself; it may close over weights, but changes no state.
      x: a tree of arrays, with the sequence along `axis`.
      tiles: how many, a divisor of the length; 1: f(x) as it is.
      axis: of the sequence, in the arrays of x and in the results.

    Returns:
      f(x).

    Raises:
      ConfigError: a length that is no multiple of `tiles`, a result without the sequence.

    >>> head, x = jnp.ones((4, 8)), {"x": jnp.ones((2, 6, 4)), "labels": jnp.zeros((2, 6), jnp.int32)}
    >>> def losses(x):
    ...     logits = jax.nn.log_softmax(x["x"] @ head)
    ...     return -jnp.take_along_axis(logits, x["labels"][..., None], -1)[..., 0]
    >>> tiled(losses, x, 3).shape
    (2, 6)
    """
    if tiles == 1:
        return f(x)
    with jax.named_scope(f"{CUT}{tiles}_of_{jnp.shape(jax.tree.leaves(x)[0])[axis]}"):
        cut = jax.tree.map(lambda leaf: _cut(leaf, tiles, axis), x)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), cut)
    run, weights = jax.closure_convert(f, one)
    wide = [_wide(w) for w in weights]

    def turn(_: None, tile: PyTree) -> tuple[None, PyTree]:
        return None, run(tile, *map(_narrow, weights, wide))

    _, y = lax.scan(jax.checkpoint(turn, prevent_cse=False), None, cut)  # type: ignore[attr-defined]
    length = jax.tree.leaves(one)[0].shape[axis]
    return jax.tree.map(lambda leaf: _joined(leaf, length, axis), y)


def _cut(x: jax.Array, tiles: int, axis: int) -> jax.Array:
    """[..., S, ...] -> [tiles, ..., S / tiles, ...]."""
    shape = jnp.shape(x)
    if tiles < 1 or shape[axis] % tiles:
        divisors = [n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0]
        raise ConfigError(
            f"tiled: tiles = {tiles} for the sequence of {shape[axis]} in {list(shape)}; choose a divisor of it: "
            + ", ".join(map(str, divisors))
        )
    x = jnp.reshape(x, (*shape[:axis], shape[axis] // tiles, tiles, *shape[axis + 1 :]))
    return jnp.moveaxis(x, axis + 1, 0)


def _joined(y: jax.Array, length: int, axis: int) -> jax.Array:
    """Undo `_cut`."""
    if y.ndim < axis + 2 or y.shape[axis + 1] != length:
        raise ConfigError(
            f"tiled: for a tile of {length} positions f returned {list(y.shape[1:])}: dimension {axis} must be the "
            "sequence; return a value for each position, and sum outside"
        )
    y = jnp.moveaxis(y, 0, axis + 1)
    return y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])


# A scan adds the gradients of what all turns use, in the dtype of what they use: of bfloat16 weights over 64 tiles that
# would lose precision. So each turn's gradient of a weight goes to a float32 copy, whose value nothing uses.


def _wide(weight: jax.Array) -> jax.Array:
    return weight.astype(jnp.promote_types(weight.dtype, jnp.float32))


def _narrow(weight: jax.Array, wide: jax.Array) -> jax.Array:
    return wide if wide.dtype == weight.dtype else _value_of(lax.stop_gradient(weight), wide)


@jax.custom_jvp
def _value_of(weight: jax.Array, wide: jax.Array) -> jax.Array:
    return weight


@_value_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    weight, _ = primals
    return weight, tangents[1].astype(weight.dtype)
