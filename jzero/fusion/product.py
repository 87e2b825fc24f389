"""The product of an elementwise function's result with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from jzero.fusion.elementwise import Elementwise, Pullback
from jzero.fusion.parts import map_parts


def mapped_dot_general(f: Elementwise, xs: Sequence[jax.Array], w: jax.Array, precision: Any = None) -> jax.Array:
    """Compute `f(parts of xs) w` for xs [M, P, K] and a weight [K, ...], as [M, ...].

    The backward pass keeps xs alone, and computes `f` again where it computes the gradients of xs.
    """
    y = _product(f, precision, tuple(xs), w.reshape(w.shape[0], -1))
    return y.reshape(-1, *w.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(f: Elementwise, precision: Any, xs: tuple[jax.Array, ...], w: jax.Array) -> jax.Array:
    (x,) = map_parts(f, xs, [1])
    return lax.dot(x[:, 0], w, precision=precision)


def _forward(f: Elementwise, precision: Any, xs: Any, w: Any) -> tuple[jax.Array, Any]:
    return _product(f, precision, xs, w), (xs, w)


def _backward(f: Elementwise, precision: Any, kept: Any, g: jax.Array) -> tuple[Any, jax.Array]:
    xs, w = kept
    dx = lax.dot_general(g, w, (((1,), (1,)), ((), ())), precision=precision)
    counts = [x.shape[1] for x in xs]
    pullback = Pullback(f, tuple(range(sum(counts))))

    def both(*parts: jax.Array) -> list[jax.Array]:
        return [*pullback(*parts), *f(*parts[:-1])]

    *dxs, x = map_parts(both, [*xs, dx[:, None]], [*counts, 1])
    return tuple(dxs), lax.dot_general(x[:, 0], g, (((0,), (0,)), ((), ())), precision=precision)


_product.defvjp(_forward, _backward)
