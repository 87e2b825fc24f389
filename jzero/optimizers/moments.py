"""Arithmetic in fp32 around any transformation, and its moments in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jzero.optimizers import fp8_moments
from jzero.optimizers.compressed import has_rows
from jzero.optimizers.rounding import noise, to_bfloat16
from jzero.optimizers.wrappers import Transform, labels
from jzero.tree import path_name

# These fields are not moments: optax's dog, dowg, prodigy, cocob and madgrad measure from copies of the parameters, and
# AMSGrad's running maximum would be one of rounding errors.
_EXACT = frozenset({"init_params", "params0", "init_particles", "x0", "nu_max"})


class Fp8State(NamedTuple):
    """An optimizer's state with its large moments in fp8. A state without any has no scales, and stays as it is.

    Attributes:
      codes: the state; multiply an fp8 array by its scale.
      scales: name of a leaf of `codes` in fp8 -> float32 [] or [layers].
    """

    codes: Any
    scales: dict[str, jax.Array]


def in_fp32(tx: Transform, state_dtype: Any, stacked: Any = None) -> Transform:
    """Run `tx` in fp32 for parameters of any dtype, and keep its per-parameter state in `state_dtype`.

    Each update loads low-precision state to fp32, computes, and rounds once, instead of at every operation: to the
    nearest number, or up or down at random by a key that `update` takes as `rounding`. State that belongs to no
    parameter (counts, scalars) keeps its dtype, and so do rows of single devices: errors of compressed communication
    are what rounding has lost, and momenta and steps of local steps are small sums. In fp8, small arrays stay in fp32.

    Args:
      tx: any transformation.
      state_dtype: float32, bfloat16 or float8_e5m2.
      stacked: as in `wrappers.labels`; in fp8 each layer of a stacked leaf has a scale of its own.
    """
    tx = optax.with_extra_args_support(tx)
    store, load = _storage(jnp.dtype(state_dtype), stacked)

    def up(tree: Any) -> Any:
        # float64 parameters stay float64
        return jax.tree.map(lambda x: _cast_floating(x, jnp.promote_types(x.dtype, jnp.float32)), tree)

    def init(params: Any) -> Any:
        return store(tx.init(up(params)), params, None)

    def update(
        updates: Any, state: Any, params: Any = None, *, rounding: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        owners = updates if params is None else params
        loaded = load(state, owners)
        new_updates, new_state = tx.update(up(updates), loaded, None if params is None else up(params), **extra)
        return new_updates, store(new_state, owners, rounding)

    return optax.GradientTransformationExtraArgs(init, update)


def _storage(dtype: Any, stacked: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return store(state, params, key or None) and load(stored, params) for moments in `dtype`."""
    if dtype == jnp.float32:
        return lambda state, params, key: state, lambda stored, params: stored
    if dtype == fp8_moments.DTYPE:
        return partial(_store_fp8, stacked), _load_fp8
    return partial(_store, dtype), _load


def _store(dtype: Any, state: Any, params: Any, key: jax.Array | None) -> Any:
    words = None if key is None else _words(params, key)

    def rounded(path: tuple, x: jax.Array, owner: tuple) -> jax.Array:
        if words is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return _cast_floating(x, dtype)
        return to_bfloat16(x.astype(jnp.float32), words(owner, x))

    return _map_moments(rounded, state, params)


def _load(stored: Any, params: Any) -> Any:
    return _map_moments(lambda path, x, owner: _cast_floating(x, jnp.float32), stored, params)


def _store_fp8(stacked: Any, state: Any, params: Any, key: jax.Array | None) -> Any:
    words, scales = None if key is None else _words(params, key), {}
    in_layers = dict(_flat(labels(stacked, lambda s, p: s, params)))

    def encoded(path: tuple, x: jax.Array, owner: tuple) -> jax.Array:
        if not fp8_moments.is_large(x, in_layers[owner]):
            return x
        if words is None:  # XLA would find the maximum of a new state, a constant, element by element as it compiles
            x = jax.lax.optimization_barrier(x)
        codes, scale = fp8_moments.encode(x, in_layers[owner], words and words(owner, x))
        scales[path_name(path)] = scale
        return codes

    codes = _map_moments(encoded, state, params)
    return Fp8State(codes, scales) if scales else codes


def _load_fp8(stored: Any, params: Any) -> Any:
    def decoded(path: tuple, x: jax.Array) -> jax.Array:
        return fp8_moments.decode(x, stored.scales[path_name(path)]) if x.dtype == fp8_moments.DTYPE else x

    return jax.tree_util.tree_map_with_path(decoded, stored.codes) if isinstance(stored, Fp8State) else stored


def _words(params: Any, key: jax.Array) -> Callable[[tuple, jax.Array], jax.Array]:
    """Make a function: a parameter's path and one of its moments -> random words, new ones at each call."""
    arrays = {path: (i, count()) for i, (path, _) in enumerate(_flat(params))}

    def words(owner: tuple, x: jax.Array) -> jax.Array:
        array, number = arrays[owner]
        return noise(x.shape, key, array, next(number))

    return words


def _cast_floating(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _flat(tree: Any) -> list[tuple[tuple, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _map_moments(function: Callable[[tuple, Any, tuple], Any], state: Any, params: Any) -> Any:
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
        return function(path, x, max(found, key=len)) if found and not exact and not has_rows(path) else x

    return jax.tree_util.tree_map_with_path(leaf, state)
