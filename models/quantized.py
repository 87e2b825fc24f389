"""Frozen matrices in 4 or 8 bits, as in QLoRA (Dettmers et al., arXiv:2305.14314): NF4 with double quantisation.

A matrix [in, *out] is divided into blocks of 64 along its input dimension. A block is its codes and one scale, the
largest magnitude; the scales of a row of blocks are themselves 8-bit integers with one step and one offset. That is
4.13 bits per element in NF4, 8.13 in int8. A product makes the matrix again in the dtype of its input, and so does its
derivative: the matrix is never kept.
"""

from itertools import pairwise
from math import gcd
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jzero._compat.kernels import function_primitive
from jzero.errors import ConfigError
from jzero.kernels.fusion.parts import FROZEN

Kind = Literal["nf4", "int8"]
BLOCK = 64
# bitsandbytes' table: quantiles of the normal distribution, scaled into [-1, 1], with an exact zero.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Quantized(NamedTuple):
    """A matrix [in, *out] in few bits."""

    codes: jax.Array  # NF4: [in / 2, *out] uint8, the first half of the rows in the low bits; int8: [in, *out] int8
    scales: jax.Array  # [in / block, *out] int8: (scale - offset) / step
    step: jax.Array  # [in / block] float32, with values of bfloat16, so that a cast to the compute dtype keeps them
    offset: jax.Array  # as `step`


def quantize(matrix: jax.Array, kind: Kind) -> Quantized:
    """Quantise a matrix [in, *out]. NF4, whose codes are two a byte, needs an even input dimension."""
    d_in, *out = matrix.shape
    if kind == "nf4" and d_in % 2:
        raise ConfigError(f'LoRAConfig: quantized = "nf4": a matrix has {d_in} inputs, must be even; use "int8"')
    block = gcd(d_in, BLOCK)
    blocks = matrix.astype(jnp.float32).reshape(d_in // block, block, -1)
    scales = jnp.abs(blocks).max(1)
    offset = scales.mean(1).astype(jnp.bfloat16).astype(jnp.float32)
    step = jnp.maximum(jnp.abs(scales - offset[:, None]).max(1), 1e-12) / 127
    step = step.astype(jnp.bfloat16).astype(jnp.float32)
    small = jnp.clip(jnp.round((scales - offset[:, None]) / step[:, None]), -127, 127).astype(jnp.int8)
    whole = jnp.maximum(small * step[:, None] + offset[:, None], 1e-12)  # as `dequantize` makes it
    x = (blocks / whole[:, None]).reshape(d_in, *out)
    if kind == "int8":
        codes = jnp.clip(jnp.round(x * 127), -127, 127).astype(jnp.int8)
    else:
        middles = jnp.array([(a + b) / 2 for a, b in pairwise(NF4)])
        nearest = jnp.searchsorted(middles, x).astype(jnp.uint8)
        codes = nearest[: d_in // 2] | nearest[d_in // 2 :] << 4
    return Quantized(codes, small.reshape(-1, *out), step, offset)


def dequantize(q: Quantized, dtype: Any) -> jax.Array:
    rows, *out = q.scales.shape
    if q.codes.dtype == jnp.uint8:
        nibbles = jnp.concatenate([q.codes & 15, q.codes >> 4])
        x = jnp.asarray(NF4, jnp.float32)[nibbles]
    else:
        x = q.codes.astype(jnp.float32) / 127
    wide = [1] * len(out)
    scales = q.scales * q.step.astype(jnp.float32).reshape(-1, *wide) + q.offset.astype(jnp.float32).reshape(-1, *wide)
    scales = jnp.maximum(scales, 1e-12)
    return (x.reshape(rows, -1, *out) * scales[:, None]).reshape(-1, *out).astype(dtype)


def quantized_matmul(module: Any, inputs: jax.Array) -> jax.Array:
    """Multiply with a layer's quantised matrix [in, *out], without the layer's bias."""
    q = Quantized(*(getattr(module, name)[...] for name in Quantized._fields))
    # One equation of a trace, so that `kernels.fusion` finds SwiGLU between two of them.
    return _product.bind(inputs, *q, jaxpr=jax.make_jaxpr(_matmul)(inputs, q), make=_dequantize_now)[0]


@jax.custom_vjp
def _matmul(inputs: jax.Array, q: Quantized) -> jax.Array:
    """Multiply with a quantised matrix, made again in the backward pass; `jax.jvp` does not pass through."""
    return _forward(inputs, q)[0]


def _forward(inputs: jax.Array, q: Quantized) -> tuple[jax.Array, Quantized]:
    # Not by `_matmul`: a checkpoint's policy sees no product inside a function with a derivative of its own.
    inputs, matrix = _dequantize_now(*q, inputs)
    return jnp.tensordot(inputs, matrix, 1), q


def _backward(q: Quantized, gradient: jax.Array) -> tuple[jax.Array, None]:
    """Return the gradient of the inputs; a quantised matrix is frozen."""
    gradient, matrix = _dequantize_now(*q, gradient)
    outputs = tuple(range(1, matrix.ndim))
    return jnp.tensordot(gradient, matrix, (tuple(-i for i in reversed(outputs)), outputs)), None


def _dequantize_now(
    codes: jax.Array, scales: jax.Array, step: jax.Array, offset: jax.Array, operand: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # In an unrolled stack XLA makes the matrices of all layers at once, and keeps them for the backward pass. So the
    # scales depend on the operand. Codes behind the barrier would be copied.
    operand, step = jax.lax.optimization_barrier((operand, step))
    return operand, dequantize(Quantized(codes, scales, step, offset), operand.dtype)


_matmul.defvjp(_forward, _backward)
_product = function_primitive(FROZEN)


def quantize_params(params: Any, like: Any, kind: Kind) -> Any:
    """Quantise the matrices of a decoder's stack, layer by layer, where the model of `like` has them in few bits.

    `params` are nested dicts of the decoder without quantisation and adapters, `like` those of the one with both, or
    their shapes; so is the result, with None for adapters.
    """
    if not isinstance(like, dict):
        return params
    made = {name: quantize_params(params.get(name), part, kind) if params else None for name, part in like.items()}
    if "codes" in like:
        one = jax.jit(lambda kernel: quantize(kernel, kind))
        layers = [one(layer) for layer in params["kernel"]]
        made |= Quantized(*(jnp.stack(parts) for parts in zip(*layers, strict=True)))._asdict()
    return made
