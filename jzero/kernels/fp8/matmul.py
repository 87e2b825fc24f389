"""The product of an activation with a weight in fp8, and its backward products.

    y = x w      x e4m3,      w e4m3
    dx = g w^T   g e5m2 *,    w e4m3
    dw = x^T g   x e4m3,      g e5m2 *        * e4m3 with `fp8.format` "e4m3"

The backward pass keeps the activation in fp8: one byte per element instead of two. Activations and gradients are scaled
by their own maximum on each device, so no collective is added; or by those of former steps (`delayed_scaling`).

Hopper's tensor cores read both factors of an fp8 product along the contracted dimension, so each of the three products
has the form [M, K] [N, K]^T, and x and g are needed transposed too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jzero._compat.kernels import function_primitive
from jzero.kernels.fp8.delayed_scaling import exponent_one_hot
from jzero.kernels.fp8.quantized import E4M3, Delayed, Quantized, amax, cast8, finite_or_nan, scale_of
from jzero.kernels.fusion.chains import MatmulForm
from jzero.kernels.fusion.elementwise import Elementwise, Pullback, each
from jzero.kernels.fusion.parts import Block, Device, Ref, Shapes, fit, has_triton, run_tiles

NAME = "fp8_dot_general"
_primitive = function_primitive(NAME)

# Hopper's tensor cores sum an fp8 product in about 14 bits. XLA lets them at the default precision; at the highest,
# partial sums go to float32 often enough. As in Transformer Engine and torchao, gradients are summed exactly. That
# costs 1 to 3 % of the speed; with fast ones the last losses of a model of 125M were 0.3 to 2.9 % above those in bf16.
FAST, EXACT = lax.Precision.DEFAULT, lax.Precision.HIGHEST


def fp8_dot_general(x: jax.Array, w: Quantized, form: MatmulForm, dtype: DTypeLike, casts: Casts) -> jax.Array:
    """Compute a `dot_general` of an activation and a weight in fp8; the result has this dtype.

    Args:
      casts: of this activation, by earlier products; this one is added.
    """
    return linked_dot_general(x, w, form, dtype, casts, linked=False)[0]


class Cast(NamedTuple):
    """A matrix [M, N] in fp8.

    Attributes:
      x8, transposed: fp8 [M, N] and [N, M]; None where one is not wanted.
      scale: float32 [], NaN unless all elements are finite.
      amax: float32 [], the largest absolute value, if `scale` does not come from it.
    """

    x8: Any
    transposed: Any
    scale: jax.Array
    amax: Any


Casts = dict[tuple, Cast]
Arrays = Sequence[jax.Array]


class GradientLink(NamedTuple):
    """Takes the gradient of a matmul's result [M, N] in fp8, from the function that alone uses the result.

    The cast is zeros in the forward pass; the gradient that flows to it is that of the result.

    Attributes:
      cast: of the gradient.
      known: the scale for it, if former steps decide it.
    """

    cast: Cast
    known: jax.Array | None


def mapped_fp8_dot_general(
    f: Elementwise, xs: Sequence[jax.Array], links: Sequence[GradientLink], w: Quantized, dtype: DTypeLike
) -> jax.Array:
    """Compute `dot_general(f(parts of xs), w)` for [M, P, K] and a weight [K, ...] in fp8."""
    # The function's result is written in fp8 alone, and the gradients of xs go through their links: nothing between
    # this product and those of the links is written in the compute dtype.
    size = xs[0].shape[-1]
    how = _How(True, xs[0].dtype, jnp.dtype(dtype), w.gradients, w.place is not None, False)
    place = None if w.place is None else w.place.reshape(size, -1)
    y = _mapped(how, f, tuple(xs), tuple(links), _Weight(w.x8, w.scale, place, w.delayed))
    return y.reshape(-1, *w.shape[1:])


def linked_dot_general(
    x: jax.Array, w: Quantized, form: MatmulForm, dtype: DTypeLike, casts: Casts, linked: bool = True
) -> tuple[jax.Array, Any]:
    """Compute `fp8_dot_general`; the gradient of its result must come through the link."""
    n = len(form.contracted)
    kept = w.shape[n:] if form.leading else w.shape[:-n]
    size = prod(x.shape[d] for d in form.contracted)
    matrix = lax.transpose(x, (*form.rows, *form.contracted)).reshape(-1, size)
    place = None if w.place is None else _matrix(w.place, form.leading, size)
    how = _How(form.leading, x.dtype, jnp.dtype(dtype), w.gradients, place is not None, linked)
    key = form.rows, form.contracted, how.trained
    if key not in casts:  # XLA would not find that two of them are the same
        known = lax.stop_gradient(w.delayed.scales[0]) if w.delayed else None
        casts[key] = _cast(identity, [lax.stop_gradient(matrix)[:, None]], E4M3, known, how.trained)
    y, link = _product(how, matrix, casts[key], _Weight(w.x8, w.scale, place, w.delayed))
    rows = tuple(x.shape[d] for d in form.rows)
    y = y.reshape(*rows, *kept)
    if form.weight_first:
        y = lax.transpose(y, (*range(len(rows), y.ndim), *range(len(rows))))
    return y, link


def _matrix(v: jax.Array, leading: bool, size: int) -> jax.Array:
    return v.reshape(size, -1) if leading else v.reshape(-1, size)


class _Weight(NamedTuple):
    """A weight as in `Quantized`, with its place as a matrix; or what flows to it."""

    x8: Any
    scale: Any
    place: jax.Array | None
    delayed: Delayed | None


class _How(NamedTuple):
    leading: bool
    x: jnp.dtype
    y: jnp.dtype
    gradients: jnp.dtype
    trained: bool
    linked: bool


def _cast(f: Callable, xs: Sequence[jax.Array], dtype: DTypeLike, known: jax.Array | None, pair: bool = True) -> Cast:
    """Cast f(*xs) to fp8.

    Args:
      known: the scale; None: the largest element decides it.
      pair: whether the transpose is wanted; by a known scale it always comes.
    """
    if known is None:
        scale = scale_of(amax_of(f, xs), dtype)
        if pair:
            x8, transposed = cast_pair(f, xs, scale, dtype)
            return Cast(x8, transposed, scale, None)
        return Cast(cast8(f(*[x[:, 0] for x in xs])[0], scale, dtype), None, scale, None)
    x8, transposed, amax = cast_pair(f, xs, known, dtype, with_amax=True)
    return Cast(x8, transposed, finite_or_nan(known, amax), amax)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: jax.Array, cast: Cast, weight: _Weight) -> tuple[jax.Array, GradientLink | None]:
    return _forward(how, x, cast, weight)[0]


def _forward(how: _How, x: jax.Array, cast: Cast, weight: _Weight) -> tuple[Any, tuple]:
    w8, scale, _, delayed = weight
    of_g = delayed.scales[1] if delayed else None
    w = _matrix(w8, how.leading, x.shape[1])
    y = _multiply(cast.x8, cast.scale, w.T if how.leading else w, scale, how.y, FAST)
    zero = jnp.zeros(())
    zeros = Cast(jnp.zeros(y.shape, how.gradients), jnp.zeros(y.shape[::-1], how.gradients), zero, delayed and zero)
    # The weight as it was gathered: stage 3 keeps any other array, such as a reshaped one, until the backward pass.
    return (y, GradientLink(zeros, of_g) if how.linked else None), (cast._replace(x8=None), w8, scale, of_g)


def _backward(how: _How, kept: tuple, gradients: tuple) -> tuple[jax.Array, None, _Weight]:
    g, link = gradients
    cast = link.cast if how.linked else _cast(identity, [g[:, None]], how.gradients, kept[-1], how.trained)
    dx, dw = _backward_products(how, kept, cast)
    return dx, None, _Weight(None, None, dw, _seen(kept, cast))


def _backward_products(how: _How, kept: tuple, g: Cast) -> tuple[jax.Array, jax.Array | None]:
    x, w8, scale, _ = kept
    w = w8.reshape(-1, g.x8.shape[1]) if how.leading else w8.reshape(g.x8.shape[1], -1)
    dx = _multiply(g.x8, g.scale, w if how.leading else w.T, scale, how.x)
    if not how.trained:
        return dx, None
    factors = (x.transposed, x.scale), (g.transposed, g.scale)
    (a, of_a), (b, of_b) = factors if how.leading else factors[::-1]
    return dx, _multiply(a, of_a, b, of_b, how.x)


def _seen(kept: tuple, g: Cast) -> Delayed | None:
    """Return the "gradient" of a `Delayed`: how large the activations and the gradients were."""
    x = kept[0]
    return None if x.amax is None else Delayed(jnp.zeros(2), seen=exponent_one_hot(jnp.stack([x.amax, g.amax])))


_product.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mapped(how: _How, f: Elementwise, xs: Arrays, links: Sequence[GradientLink], weight: _Weight) -> jax.Array:
    return _mapped_forward(how, f, xs, links, weight)[0]


def _mapped_forward(
    how: _How, f: Elementwise, xs: Arrays, links: Sequence[GradientLink], weight: _Weight
) -> tuple[jax.Array, tuple]:
    w8, scale, _, delayed = weight
    of_x, of_g = delayed.scales if delayed else (None, None)
    cast = _cast(f, xs, E4M3, of_x)
    w = _matrix(w8, how.leading, xs[0].shape[-1])
    y = _multiply(cast.x8, cast.scale, w.T, scale, how.y, FAST)
    return y, (xs, [link.known for link in links], (cast._replace(x8=None), w8, scale, of_g))


def _mapped_backward(
    how: _How, f: Elementwise, saved: tuple, g: jax.Array
) -> tuple[None, tuple[GradientLink, ...], _Weight]:
    xs, known, kept = saved
    cast = _cast(identity, [g[:, None]], how.gradients, kept[-1])
    dx, dw = _backward_products(how, kept, cast)
    # The function runs again in the pass that casts the gradients of xs. For SwiGLU and 8,192 tokens that takes 387 us
    # on an H200, and XLA's kernels take 1,063.
    links, start = [], 0
    for x, scale in zip(xs, known, strict=True):
        own = Pullback(f, tuple(range(start, start := start + x.shape[1])))
        arrived = _cast(own, [*xs, dx[:, None]], how.gradients, scale)
        links.append(GradientLink(arrived, None if scale is None else jnp.zeros(())))
    return None, tuple(links), _Weight(None, None, dw, _seen(kept, cast))


_mapped.defvjp(_mapped_forward, _mapped_backward)


def _multiply(
    a: jax.Array, of_a: jax.Array, b: jax.Array, of_b: jax.Array, dtype: DTypeLike, precision: lax.Precision = EXACT
) -> jax.Array:
    """Compute [M, K] [N, K]^T of scaled arrays. It is one equation of a trace, whose operands are fp8."""
    operands = a, 1 / of_a, b, 1 / of_b
    jaxpr = jax.make_jaxpr(partial(_scaled, dtype=dtype, precision=precision))(*operands)
    (y,) = _primitive.bind(*operands, jaxpr=jaxpr)
    return y


def _scaled(
    a: jax.Array,
    inverse_a: jax.Array,
    b: jax.Array,
    inverse_b: jax.Array,
    *,
    dtype: DTypeLike,
    precision: lax.Precision,
) -> jax.Array:
    """Compute [M, K] [N, K]^T in a wider dtype."""
    # XLA recognizes this form, and makes one fp8 product of it (`__cublas$lt$matmul$f8`).
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32

    def widened(v: jax.Array, inverse: jax.Array) -> jax.Array:
        return v.astype(wide) * jnp.broadcast_to(inverse.astype(wide), v.shape)

    numbers = (((1,), (1,)), ((), ()))
    return lax.dot_general(
        widened(a, inverse_a), widened(b, inverse_b), numbers, precision=precision, preferred_element_type=dtype
    )


# ------------------------------------------------------------------ casts, in one pass over memory where a kernel can


def identity(*xs: jax.Array) -> list[jax.Array]:
    return list(xs)


def amax_of(f: Callable, xs: Sequence[jax.Array]) -> jax.Array:
    """Return the largest absolute value of f's results, float32 []."""
    return amax(*f(*each(xs)))


def cast_pair(
    f: Callable, xs: Sequence[jax.Array], scale: jax.Array, dtype: DTypeLike, with_amax: bool = False
) -> tuple[jax.Array, ...]:
    """Round `f(*xs) * scale` to an fp8 dtype; return it and its transpose.

    Args:
      f: takes one array for each part of each operand, and returns Q.
      xs: [M, P, N], each of P parts.
      scale: float32 [].
      with_amax: return the largest absolute value of f's results too.

    Returns:
      [M, Q N], [Q N, M], and float32 [] `with_amax`.
    """
    jaxpr = jax.make_jaxpr(partial(_plain, f, dtype, with_amax))(*xs, scale)
    return tuple(_cast_pair.bind(*xs, scale, jaxpr=jaxpr, f=f))


def _plain(f: Callable, dtype: DTypeLike, with_amax: bool, *operands: jax.Array) -> tuple[jax.Array, ...]:
    *xs, scale = operands
    x8 = jnp.concatenate([cast8(y, scale, dtype) for y in f(*each(xs))], axis=1)
    return (x8, x8.T, amax_of(f, xs)) if with_amax else (x8, x8.T)


def _kernel(operands: Shapes, results: Shapes, device: Device, f: Callable) -> Callable | None:
    """Choose a kernel; None: XLA's program."""
    *xs, _ = operands
    if not has_triton(device) or not supports_cast([x.shape for x in xs], results[0].shape):
        return None
    return partial(tiled_cast_pair, f, dtype=results[0].dtype, with_amax=len(results) == 3)


_cast_pair = function_primitive("fp8_cast_pair", _kernel)

# ------------------------------------------------------------------ as a Triton kernel (Pallas)

# The cast of [8192, 4096] and of its transpose takes 45 us on an H200; XLA's kernels take 79 to 100.

# Of a tile. Measured on an H200 from 32x128 to 256x64: 2.8 to 3.4 TB/s; this one was among the fastest for every shape.
ROWS, COLUMNS = 32, 128


def supports_cast(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> bool:
    """Return whether the kernel takes arrays [m, p, n], and returns [m, q n]."""
    m, _, n = shapes[0]
    return fit([*shapes, (m, out[1] // n, n)], ROWS, COLUMNS)


def tiled_cast_pair(f: Callable, *operands: jax.Array, dtype: DTypeLike, with_amax: bool) -> tuple[jax.Array, ...]:
    """Compute `cast_pair`: write each tile of the results, and its transpose, and its largest element."""
    *xs, scale = operands
    (m, _, n), read = xs[0].shape, sum(x.shape[1] for x in xs)
    made = len(jax.eval_shape(f, *[jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)] * read))

    def kernel(*refs: Ref) -> None:
        # x [ROWS, P, COLUMNS] of each operand, scale [1]
        # out [ROWS, Q, COLUMNS], transposed [Q, COLUMNS, ROWS], amax [1, 1]
        (*x_refs, scale_ref), (out_ref, transposed_ref, *amax_refs) = refs[: len(operands)], refs[len(operands) :]
        ys = f(*each(x_refs))
        for q, y in enumerate(ys):
            y8 = cast8(y, scale_ref[0], dtype)
            out_ref[:, q, :] = y8
            transposed_ref[q, :, :] = y8.T
        for ref in amax_refs:
            ref[0, 0] = amax(*ys)

    # A maximum for each tile: a second pass over these few replaces atomics.
    grid = m // ROWS, n // COLUMNS
    results = [((m, made, n), dtype), ((made, n, m), dtype), *[(grid, jnp.float32)] * with_amax]
    blocks: list[Block] = [((ROWS, x.shape[1], COLUMNS), (0, None, 1)) for x in xs]
    blocks += [((1,), (None,)), ((ROWS, made, COLUMNS), (0, None, 1)), ((made, COLUMNS, ROWS), (None, 1, 0))]
    blocks += [((1, 1), (0, 1))] * with_amax
    shapes = [jax.ShapeDtypeStruct(*result) for result in results]
    found = run_tiles("fp8_cast_pair", kernel, grid, [*xs, scale.reshape(1)], shapes, blocks)
    return found[0].reshape(m, -1), found[1].reshape(-1, m), *map(amax, found[2:])
