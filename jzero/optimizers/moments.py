"""The moments of any transformation in fewer bits, rounded up or down at random.

Rounded so, the mean is the number, and small changes are not lost. fp8 is e5m2 times one power of two for each array of
a layer. Moments, second moments above all, span many powers of two: e5m2 has 32, with four numbers in each but the
lowest two. Nothing but 0 becomes 0, since an update divides by the root of a second moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jzero.kernels.fp8.quantized import BIAS, amax, exponent_of, finite_or_nan, power_of_two
from jzero.optimizers.transforms import StateFormat, labels
from jzero.tree import PyTree, cast, path_name
from jzero.values.hash32 import hash32

# These fields are not moments: optax's dog, dowg, prodigy, cocob and madgrad measure from copies of the parameters, and
# AMSGrad's running maximum would be one of rounding errors.
_EXACT = frozenset({"init_params", "params0", "init_particles", "x0", "nu_max"})

FP8 = jnp.float8_e5m2
FP8_LEAST = 2**16  # elements of a layer's array; smaller ones, norms and biases, stay as they are
_LARGEST = 14  # exponent of an array's largest code, which may be rounded up; e5m2 goes on to 15
_NORMAL, _SUBNORMAL = np.float32(2.0**-14), np.float32(2.0**-16)  # the smallest of each in e5m2
_HALF = np.uint32(2**31)


class Fp8State(NamedTuple):
    """An optimizer's state with its large moments in fp8. A state without any has no scales, and stays as it is.

    Attributes:
      codes: the state; multiply an fp8 array by its scale.
      scales: name of a leaf of `codes` in fp8 -> float32 [] or [layers].
    """

    codes: PyTree
    scales: dict[str, jax.Array]


def state_format(dtype: DTypeLike, stacked: PyTree = None) -> StateFormat:
    """Make the format of per-parameter state in this dtype, for `in_fp32`.

    Each update loads low-precision state to fp32, computes, and rounds once, instead of at every operation: to the
    nearest number, or up or down at random by a key. State that belongs to no parameter (counts, scalars) keeps its
    dtype. In fp8, small arrays stay in fp32.

    Args:
      dtype: float32, bfloat16 or float8_e5m2.
      stacked: as in `transforms.labels`; in fp8 each layer of a stacked leaf has a scale of its own.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return StateFormat()
    if dtype == FP8:
        return StateFormat(partial(_store_fp8, stacked), _load_fp8)
    return StateFormat(partial(_store, dtype), _load)


def _store(dtype: DTypeLike, state: PyTree, params: PyTree, key: jax.Array | None) -> PyTree:
    words = None if key is None else _words(params, key)

    def rounded(path: tuple, x: jax.Array, owner: tuple) -> jax.Array:
        if words is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return cast(x, dtype)
        return to_bfloat16(x.astype(jnp.float32), words(owner, x))

    return _map_moments(rounded, state, params)


def _load(stored: PyTree, params: PyTree) -> PyTree:
    return _map_moments(lambda path, x, owner: cast(x, jnp.float32), stored, params)


def _store_fp8(stacked: PyTree, state: PyTree, params: PyTree, key: jax.Array | None) -> PyTree:
    words, scales = None if key is None else _words(params, key), {}
    in_layers = dict(_flat(labels(stacked, lambda s, p: s, params)))

    def encoded(path: tuple, x: jax.Array, owner: tuple) -> jax.Array:
        if not is_large(x, in_layers[owner]):
            return x
        if words is None:  # XLA would find the maximum of a new state, a constant, element by element as it compiles
            x = jax.lax.optimization_barrier(x)
        codes, scale = encode_fp8(x, in_layers[owner], words and words(owner, x))
        scales[path_name(path)] = scale
        return codes

    codes = _map_moments(encoded, state, params)
    return Fp8State(codes, scales) if scales else codes


def _load_fp8(stored: PyTree, params: PyTree) -> PyTree:
    def decoded(path: tuple, x: jax.Array) -> jax.Array:
        return decode_fp8(x, stored.scales[path_name(path)]) if x.dtype == FP8 else x

    return jax.tree_util.tree_map_with_path(decoded, stored.codes) if isinstance(stored, Fp8State) else stored


def _words(params: PyTree, key: jax.Array) -> Callable[[tuple, jax.Array], jax.Array]:
    """Make a function: a parameter's path and one of its moments -> random words, new ones at each call."""
    arrays = {path: (i, count()) for i, (path, _) in enumerate(_flat(params))}

    def words(owner: tuple, x: jax.Array) -> jax.Array:
        array, number = arrays[owner]
        return noise(x.shape, key, array, next(number))

    return words


def _flat(tree: PyTree) -> list[tuple[tuple, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _map_moments(function: Callable[[tuple, Any, tuple], Any], state: PyTree, params: PyTree) -> PyTree:
    """Map function(path, leaf, owner's path) over the moments.

    These are the state leaves that belong to a parameter, the same on all devices, but for the fields in `_EXACT`. The
    key path of such a leaf ends with the parameter's.

    Paths are tuples of keys, so the suffixes of each state leaf are looked up, one for each length of parameter path.
    """
    owners = {path for path, _ in _flat(params)}
    lengths = {len(path) for path in owners}

    def leaf(path: tuple, x: Any) -> Any:
        found = [path[len(path) - n :] for n in lengths if n <= len(path) and path[len(path) - n :] in owners]
        exact = any(getattr(key, "name", None) in _EXACT for key in path)
        return function(path, x, max(found, key=len)) if found and not exact else x

    return jax.tree_util.tree_map_with_path(leaf, state)


# ---- rounding -----------------------------------------------------------------------------------------------------


def to_bfloat16(x: jax.Array, words: jax.Array) -> jax.Array:
    """Round float32 numbers to one of the two nearest bfloat16 numbers, with a probability by its closeness.

    Args:
      x: float32.
      words: random uint32s of the same shape.

    >>> found = to_bfloat16(jnp.full(10000, 1 + 1 / 512), noise((10000,), jax.random.key(0)))
    >>> sorted(set(found.tolist())), 0.7 < float((found == 1).mean()) < 0.8  # bfloat16 has 1 and 1 + 4 / 512
    ([1.0, 1.0078125], True)
    """
    return jnp.where(jnp.isfinite(x), keep_bits(x, words, 7), x).astype(jnp.bfloat16)


def keep_bits(x: jax.Array, words: jax.Array | np.uint32, mantissa: int) -> jax.Array:
    """Round finite float32 numbers up or down to these mantissa bits; towards 0 where the words are 0."""
    dropped = 23 - mantissa
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (words >> np.uint32(32 - dropped))
    return jax.lax.bitcast_convert_type(bits >> np.uint32(dropped) << np.uint32(dropped), jnp.float32)


def noise(shape: tuple[int, ...], key: jax.Array, array: int = 0, number: int = 0) -> jax.Array:
    """Make random uint32s of a shape; their upper bits are the most random.

    They follow from the key, the array's index and the element's place in the whole array, not from how devices divide
    it. They are a hash, which XLA computes in the pass over memory that it makes anyway: `number` 0 and 1 use two
    halves of one hash.
    """
    first, *_, last = jax.random.key_data(key).astype(jnp.uint32)
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        place = place * np.uint32(size & 0xFFFFFFFF) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    start = first + np.uint32((2 * array + number // 2 + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    words = hash32(hash32(place + hash32(start)) ^ last)
    return words << np.uint32(16) | words >> np.uint32(16) if number % 2 else words


def is_large(x: jax.Array, layered: bool) -> bool:
    """Return whether a moment is worth rounding; `layered`: its first axis is the layer axis."""
    return jnp.issubdtype(x.dtype, jnp.floating) and prod(x.shape[1 if layered else 0 :]) >= FP8_LEAST


def encode_fp8(x: jax.Array, layered: bool, words: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Round a moment to fp8.

    Args:
      x: of any floating dtype.
      layered: the first axis of `x` is the layer axis; each layer then has a scale of its own.
      words: random uint32s, see `noise`; None: round to the nearest number.

    Returns:
      The codes, float8_e5m2 with the shape of `x`, and the scale, float32 [] or [layers]: NaN if an element is not
      finite.

    >>> codes, scale = encode_fp8(jnp.array([0.0, -1.0, 1.2e-4, 1e-12]), False)
    >>> codes.tolist(), float(scale) * 2**14
    ([0.0, -16384.0, 2.0, 1.52587890625e-05], 1.0)
    >>> [f"{x:.2g}" for x in decode_fp8(codes, scale).tolist()]
    ['0', '-1', '0.00012', '9.3e-10']
    """
    x = x.astype(jnp.float32)
    largest = amax(x, axis=tuple(range(int(layered), x.ndim)))
    exponent = exponent_of(largest) - BIAS
    exponent = jnp.maximum(exponent, -100) - _LARGEST  # so that the inverse is a normal number
    size = jnp.abs(x * _over(power_of_two(BIAS - exponent), x))
    # subnormal numbers have the distances of those in the first power of two above them
    lift = jnp.where(size < _NORMAL, _NORMAL, 0)
    size = keep_bits(size + lift, _HALF if words is None else words, 2) - lift
    size = jnp.where(x == 0, 0, jnp.maximum(size, _SUBNORMAL))
    # A saturated infinity would look like any other number, and the bits of a NaN may be rounded to one.
    return _to_e5m2(jnp.copysign(size, x)), finite_or_nan(power_of_two(exponent + BIAS), largest)


def decode_fp8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the float32 numbers that codes stand for; the arguments are what `encode_fp8` returns."""
    return codes.astype(jnp.float32) * _over(scale, codes)


def _to_e5m2(x: jax.Array) -> jax.Array:
    """Cast numbers that e5m2 has; it is the upper half of float16. XLA's cast takes more instructions."""
    upper = jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16) >> np.uint16(8)
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint8), FP8)


def _over(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Give a scale the axes of the array that it belongs to."""
    return scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
