"""The product of an activation with a weight in fp8, and its backward products.

    y = x w      x e4m3,      w e4m3
    dx = g w^T   g e5m2 *,    w e4m3
    dw = x^T g   x e4m3,      g e5m2 *        * e4m3 with `fp8.format` "e4m3"

The backward pass keeps the activation in fp8: one byte per element instead of two. Activations and gradients are scaled
by their own maximum on each device, so no collective is added.

Hopper's tensor cores read both factors of an fp8 product along the contracted dimension, so each of the three products
has the form [M, K] [N, K]^T, and x and g are needed transposed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero._compat import function_primitive
from jzero.fp8.casts import amax_of, cast_pair, identity
from jzero.fp8.quantized import E4M3, Quantized, cast8, scale_of
from jzero.fusion.elementwise import Elementwise, Pullback
from jzero.fusion.form import Form

NAME = "fp8_dot_general"
_primitive = function_primitive(NAME)

# Hopper's tensor cores sum an fp8 product in about 14 bits. XLA lets them at the default precision; at the highest,
# partial sums go to float32 often enough. As in Transformer Engine and torchao, gradients are summed exactly.
FAST, EXACT = lax.Precision.DEFAULT, lax.Precision.HIGHEST

# Equations of a trace whose inner programs take weights in fp8; `dot_general` does, and every other primitive gets the
# rounded weight.
CALLS = ("jit", "closed_call", "core_call", "remat2", "checkpoint")


def dot_general(x: jax.Array, w: Quantized, form: Form, dtype: Any) -> jax.Array:
    """Compute a `dot_general` of an activation and a weight in fp8; the result has this dtype."""
    return _product_of(x, w, form, dtype, linked=False)[0]


class Link(NamedTuple):
    """Where the gradient of a product's result [M, N] arrives in fp8, from the function that alone uses the result.

    All are zeros in the forward pass; the gradients that flow to them are: fp8 [M, N] and [N, M], and their scale.
    """

    g8: jax.Array
    transposed: jax.Array
    scale: jax.Array


def linked_dot_general(x: jax.Array, w: Quantized, form: Form, dtype: Any) -> tuple[jax.Array, Link]:
    """Compute `dot_general`; the gradient of its result must come through the link."""
    return _product_of(x, w, form, dtype, linked=True)


def mapped_dot_general(
    f: Elementwise, xs: Sequence[jax.Array], links: Sequence[Link], w: Quantized, dtype: Any
) -> jax.Array:
    """Compute `dot_general(f(parts of xs), w)` for [M, P, K] and a weight [K, ...] in fp8.

    The function's result is written in fp8 alone, and the gradients of xs go through their links: nothing between this
    product and those of the links is written in the compute dtype.
    """
    size = xs[0].shape[-1]
    how = _How(True, xs[0].dtype, jnp.dtype(dtype), w.gradients, w.place is not None, False)
    place = None if w.place is None else w.place.reshape(size, -1)
    y = _mapped(how, f, tuple(xs), tuple(links), w.x8, w.scale, place)
    return y.reshape(-1, *w.shape[1:])


def _product_of(x: jax.Array, w: Quantized, form: Form, dtype: Any, linked: bool) -> tuple[jax.Array, Any]:
    n = len(form.contracted)
    kept = w.shape[n:] if form.leading else w.shape[:-n]
    size = prod(x.shape[d] for d in form.contracted)
    matrix = lax.transpose(x, (*form.rows, *form.contracted)).reshape(-1, size)
    place = None if w.place is None else _matrix(w.place, form.leading, size)
    how = _How(form.leading, x.dtype, jnp.dtype(dtype), w.gradients, place is not None, linked)
    y, link = _product(how, matrix, w.x8, w.scale, place)
    rows = tuple(x.shape[d] for d in form.rows)
    y = y.reshape(*rows, *kept)
    if form.weight_first:
        y = lax.transpose(y, (*range(len(rows), y.ndim), *range(len(rows))))
    return y, link


def _matrix(v: jax.Array, leading: bool, size: int) -> jax.Array:
    return v.reshape(size, -1) if leading else v.reshape(-1, size)


class _How(NamedTuple):
    leading: bool
    x: Any  # dtypes
    y: Any
    gradients: Any
    trained: bool
    linked: bool


def _scaled_pair(f: Any, xs: Sequence[jax.Array], dtype: Any, pair: bool = True) -> tuple[Any, Any, jax.Array]:
    """Cast f(*xs) to fp8 by its largest element; return it, its transpose unless it is not wanted, and the scale."""
    scale = scale_of(amax_of(f, xs), dtype)
    if pair:
        return *cast_pair(f, xs, scale, dtype), scale
    return cast8(f(*[x[:, 0] for x in xs])[0], scale, dtype), None, scale


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: Any, w8: Any, scale: Any, place: Any) -> Any:
    return _forward(how, x, w8, scale, place)[0]


def _forward(how: _How, x: Any, w8: Any, scale: Any, place: Any) -> tuple[Any, Any]:
    x8, transposed, of_x = _scaled_pair(identity, [x[:, None]], E4M3, how.trained)
    w = _matrix(w8, how.leading, x.shape[1])
    y = _multiply(x8, of_x, w.T if how.leading else w, scale, how.y, FAST)
    zeros = Link(jnp.zeros(y.shape, how.gradients), jnp.zeros(y.shape[::-1], how.gradients), jnp.zeros(()))
    # The weight as it was gathered: stage 3 keeps any other array, such as a reshaped one, until the backward pass.
    return (y, zeros if how.linked else None), (transposed, of_x, w8, scale)


def _backward(how: _How, kept: Any, gradients: Any) -> tuple[Any, None, None, Any]:
    g, link = gradients
    pair = link if how.linked else _scaled_pair(identity, [g[:, None]], how.gradients, how.trained)
    dx, dw = _backward_products(how, kept, *pair)
    return dx, None, None, dw


def _backward_products(how: _How, kept: Any, g8: Any, g8t: Any, of_g: Any) -> tuple[Any, Any]:
    x8t, of_x, w8, scale = kept
    w = w8.reshape(-1, g8.shape[1]) if how.leading else w8.reshape(g8.shape[1], -1)
    dx = _multiply(g8, of_g, w if how.leading else w.T, scale, how.x)
    if not how.trained:
        return dx, None
    factors = (x8t, of_x), (g8t, of_g)
    (a, of_a), (b, of_b) = factors if how.leading else factors[::-1]
    return dx, _multiply(a, of_a, b, of_b, how.x)


_product.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mapped(how: _How, f: Elementwise, xs: Any, links: Any, w8: Any, scale: Any, place: Any) -> Any:
    return _mapped_forward(how, f, xs, links, w8, scale, place)[0]


def _mapped_forward(how: _How, f: Elementwise, xs: Any, links: Any, w8: Any, scale: Any, place: Any) -> Any:
    x8, x8t, of_x = _scaled_pair(f, xs, E4M3)
    w = _matrix(w8, how.leading, xs[0].shape[-1])
    return _multiply(x8, of_x, w.T, scale, how.y, FAST), (xs, (x8t, of_x, w8, scale))


def _mapped_backward(how: _How, f: Elementwise, saved: Any, g: Any) -> tuple[None, Any, None, None, Any]:
    xs, kept = saved
    dx, dw = _backward_products(how, kept, *_scaled_pair(identity, [g[:, None]], how.gradients))
    links, start = [], 0
    for x in xs:
        own = Pullback(f, tuple(range(start, start := start + x.shape[1])))
        links.append(Link(*_scaled_pair(own, [*xs, dx[:, None]], how.gradients)))
    return None, tuple(links), None, None, dw


_mapped.defvjp(_mapped_forward, _mapped_backward)


def _multiply(a: Any, of_a: Any, b: Any, of_b: Any, dtype: Any, precision: Any = EXACT) -> Any:
    """Compute [M, K] [N, K]^T of scaled arrays. It is one equation of a trace, whose operands are fp8."""
    operands = a, 1 / of_a, b, 1 / of_b
    jaxpr = jax.make_jaxpr(partial(_scaled, dtype=dtype, precision=precision))(*operands)
    (y,) = _primitive.bind(*operands, jaxpr=jaxpr)
    return y


def _scaled(a: Any, inverse_a: Any, b: Any, inverse_b: Any, *, dtype: Any, precision: Any) -> Any:
    """XLA recognizes this form, and makes one fp8 product of it (`__cublas$lt$matmul$f8`)."""
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32

    def widened(v: Any, inverse: Any) -> Any:
        return v.astype(wide) * jnp.broadcast_to(inverse.astype(wide), v.shape)

    numbers = (((1,), (1,)), ((), ()))
    return lax.dot_general(
        widened(a, inverse_a), widened(b, inverse_b), numbers, precision=precision, preferred_element_type=dtype
    )
