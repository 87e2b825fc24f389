"""The softmax cross-entropy of rows of logits, and its gradient, each in one pass over memory where there is a kernel.

XLA reads the logits twice in the forward pass, for the maximum and for the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jzero._compat.kernels import function_primitive
from jzero.kernels.fusion.parts import Device, Ref, Shapes, has_triton

# Columns that a program reads at a time, and its warps. Of [32768, 50304] in bf16 on an H200, the sums take 1.59 ms so,
# and 1.63 to 2.75 with 2,048 to 8,192 columns.
COLUMNS, WARPS = 1024, 4
LOG2E = math.log2(math.e)


def row_losses(
    logits: jax.Array, labels: jax.Array, axis: str | None = None, size: jax.Array | int | None = None
) -> jax.Array:
    """Compute float32 cross-entropies [...] of logits [..., V], with the gradient written out.

    Autodiff would keep float32 probabilities [..., V] for the backward pass. Written out, the residuals are the logits
    in their own dtype and two numbers per row: the gradient is softmax(logits) - one_hot(label).

    Args:
      labels: [...] integers; one that is no column has the logit 0.
      axis: the mesh axis that the columns are divided over; None: they are whole.
      size: how many columns of all devices count, the first ones; default: all.
    """

    def own(labels: jax.Array) -> tuple[jax.Array, jax.Array | int]:
        """Return the labels' columns among the local ones, and how many of these count."""
        width, labels = logits.shape[-1], labels.astype(jnp.int32)
        start = 0 if axis is None else lax.axis_index(axis) * width
        return labels - start, width if size is None else jnp.clip(size - start, 0, width)

    def forward(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        highest, total, picked = row_sums(logits, *own(labels))
        if axis is not None:
            local, highest = highest, lax.pmax(highest, axis)  # of all slices, so that no exponential overflows
            total, picked = lax.psum(jnp.stack([total * jnp.exp(local - highest), picked]), axis)
        # Apart: their sum in float32 has the error of a number as large as the logits, which may all be far from 0.
        log_total = jnp.log(total)
        return log_total - (picked - highest), (logits, labels, highest, log_total)

    def backward(saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, None]:
        logits, labels, highest, log_total = saved
        return row_gradient(logits, *own(labels), highest, log_total, g), None

    @jax.custom_vjp
    def losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return forward(logits, labels)[0]

    losses.defvjp(forward, backward)
    return losses(logits, labels)


def row_sums(logits: jax.Array, labels: jax.Array, size: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute what the cross-entropy of each row of logits [..., V] needs.

    Args:
      labels: [...], int32; one that is no column has no logit.
      size: how many columns count, the first ones.

    Returns:
      A maximum m, the sum of exp(logit - m), and the logit of the label or 0: each float32 [...]. If no column counts,
      m is the lowest number and the sum 0.
    """
    highest, total, picked = _bind(_sums, logits, labels, size)
    return highest, total, picked


def row_gradient(
    logits: jax.Array, labels: jax.Array, size: jax.Array | int, highest: jax.Array, log_total: jax.Array, g: jax.Array
) -> jax.Array:
    """Compute (exp(logits - highest - log_total) - one_hot(labels)) * g in the logits' dtype; see `row_sums`."""
    (dx,) = _bind(_gradient, logits, labels, size, highest, log_total, g)
    return dx


def _bind(
    f: Callable, logits: jax.Array, labels: jax.Array, size: jax.Array | int, *more: jax.Array
) -> list[jax.Array]:
    operands = logits, labels, jnp.asarray(size, jnp.int32), *more
    return _primitive.bind(*operands, jaxpr=jax.make_jaxpr(f)(*operands))


def _sums(x: jax.Array, labels: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    columns = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    x = jnp.where(columns < size, x.astype(jnp.float32), -jnp.inf)
    highest = jnp.maximum(x.max(-1), _LOWEST)
    picked = jnp.where(columns == labels[..., None], x, 0).sum(-1)
    return highest, jnp.exp(x - highest[..., None]).sum(-1), picked


def _gradient(
    x: jax.Array, labels: jax.Array, size: jax.Array, highest: jax.Array, log_total: jax.Array, g: jax.Array
) -> tuple[jax.Array]:
    columns = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    p = jnp.exp((x.astype(jnp.float32) - highest[..., None]) - log_total[..., None])
    dx = (p - (columns == labels[..., None])) * g[..., None]
    return (jnp.where(columns < size, dx, 0).astype(x.dtype),)


_LOWEST = float(jnp.finfo(jnp.float32).min)


def _kernel(operands: Shapes, results: Shapes, device: Device) -> Callable | None:
    """Choose a kernel; None: XLA's program."""
    logits = operands[0]
    # Rows of 16 bytes each, so that a thread reads as many at a time.
    if not has_triton(device) or logits.ndim < 2 or logits.shape[-1] % 8 or not logits.size:
        return None
    return tiled_gradient if len(results) == 1 else tiled_sums


_primitive = function_primitive("softmax_rows", _kernel)
Shaped = jax.Array | jax.ShapeDtypeStruct

# ------------------------------------------------------------------ as Triton kernels (Pallas), a program for each row


def tiled_sums(logits: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Compute `row_sums`, with a running maximum (Milakov and Gimelshein, arXiv:1805.02867)."""
    V = logits.shape[-1]
    width = min(COLUMNS, 1 << (V - 1).bit_length())

    # logits [1, V], label [1], size []; highest, total, picked [1]
    def kernel(x_ref: Ref, label_ref: Ref, size_ref: Ref, highest_ref: Ref, total_ref: Ref, picked_ref: Ref) -> None:
        label, size = label_ref[0], size_ref[()]

        def step(i: jax.Array, carry: tuple, masked: bool) -> tuple:
            (highest, total), (x, columns) = carry, _read(x_ref, i * width, width, masked)
            x = jnp.where(columns < size, x, -jnp.inf) if masked else x
            higher = jnp.maximum(highest, x.max())
            return higher, total * _exp(highest, higher) + _exp(x, higher)

        carry = jnp.float32(_LOWEST), jnp.zeros(width, jnp.float32)
        highest_ref[0], total = _over_columns(step, carry, size, V, width)
        total_ref[0] = total.sum()
        inside = (label >= 0) & (label < V)
        picked = x_ref[0, jnp.where(inside, label, 0)].astype(jnp.float32)
        picked_ref[0] = jnp.where(inside, jnp.where(label < size, picked, -jnp.inf), 0)

    sums = [jax.ShapeDtypeStruct(logits.shape[:-1], jnp.float32)] * 3
    return _by_row("softmax_sums", kernel, [logits, *others], sums, {})


def tiled_gradient(logits: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Compute `row_gradient` in the place of the logits."""
    from jax.experimental.pallas import triton

    V = logits.shape[-1]
    width = min(COLUMNS, 1 << (V - 1).bit_length())

    # logits [1, V], label [1], size [], highest [1], log_total [1], g [1]; dx [1, V]
    def kernel(x_ref: Ref, label_ref: Ref, size_ref: Ref, *refs: Ref) -> None:
        *row_refs, dx_ref = refs
        label, size, (highest, log_total, g) = label_ref[0], size_ref[()], (ref[0] for ref in row_refs)
        log2_total = log_total * LOG2E  # so that its subtraction is one instruction with the product in `_exp`

        def step(i: jax.Array, carry: tuple, masked: bool) -> tuple:
            x, columns = _read(x_ref, i * width, width, masked)
            dx = (_exp(x, highest, log2_total) - jnp.where(columns == label, 1.0, 0.0)) * g
            dx = jnp.where(columns < size, dx, 0) if masked else dx
            mask = columns < V if masked and V % width else None
            triton.store(dx_ref.at[0, columns], dx.astype(dx_ref.dtype), mask=mask)
            return carry

        _over_columns(step, (), size, V, width)

    return _by_row("softmax_gradient", kernel, [logits, *others], [logits], {0: 0})


def _over_columns(step: Callable, carry: tuple, size: jax.Array, V: int, width: int) -> tuple:
    """Run `step(i, carry, masked)` on all columns, `width` at a time; with masks where some do not count."""
    # The time of these kernels is that of their instructions: masks on all columns take 30 % more.
    whole = lax.div(size, width)
    carry = lax.fori_loop(0, whole, lambda i, carry: step(i, carry, masked=False), carry)
    return lax.fori_loop(whole, -(-V // width), lambda i, carry: step(i, carry, masked=True), carry)


def _exp(x: jax.Array, highest: jax.Array, log2_total: jax.Array | float = 0.0) -> jax.Array:
    """Compute exp(x - highest) / 2**log2_total in fewer instructions: Triton's exp is exact to the last bit."""
    return jnp.exp2((x - highest) * LOG2E - log2_total)


def _read(ref: Ref, start: jax.Array, width: int, masked: bool) -> tuple[jax.Array, jax.Array]:
    """Read columns of a row in float32; return their numbers too."""
    from jax.experimental.pallas import triton

    columns, V = start + jnp.arange(width), ref.shape[1]
    mask = {"mask": columns < V, "other": -jnp.inf} if masked and V % width else {}
    return triton.load(ref.at[0, columns], **mask).astype(jnp.float32), columns


def _by_row(
    name: str, kernel: Callable, operands: Sequence[jax.Array], results: Sequence[Shaped], aliases: dict[int, int]
) -> list[jax.Array]:
    """Run a kernel on each row of arrays [..., V] and [...]; it gets scalars as they are."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    ndim = operands[0].ndim - 1
    rows = math.prod(operands[0].shape[:ndim])
    flat = [x.reshape(rows, *x.shape[ndim:]) if x.ndim else x for x in operands]
    out = [jax.ShapeDtypeStruct((rows, *y.shape[ndim:]), y.dtype) for y in results]

    def spec(x: Shaped) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:])[: x.ndim], lambda i: (i, 0)[: x.ndim])

    found = pl.pallas_call(
        kernel,
        grid=(rows,),
        in_specs=[spec(x) for x in flat],
        out_specs=[spec(y) for y in out],
        out_shape=out,
        input_output_aliases=aliases,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        name=name,
    )(*flat)
    return [y.reshape(result.shape) for y, result in zip(found, results, strict=True)]
