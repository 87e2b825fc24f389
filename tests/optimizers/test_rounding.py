"""Moments in bfloat16 and fp8, rounded at random: against NumPy's neighbours, in every layout."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import NamedSharding

import jzero
from jzero.optimizers import moments
from jzero.optimizers.moments import decode_fp8, encode_fp8, noise, state_format, to_bfloat16
from jzero.optimizers.transforms import in_fp32

KEY, SMALL = jax.random.key(3), 4096
GRID = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
GRID = GRID[np.isfinite(GRID)]


@partial(jax.jit, static_argnums=(2, 3))
def to_16_bits(x, key=KEY, array=0, number=0):
    return to_bfloat16(x, noise(x.shape, key, array, number))


# Two programs: in one XLA might leave out the rounding in between.
decoded = jax.jit(decode_fp8)
encoded = jax.jit(lambda x: encode_fp8(x, False, noise(x.shape, KEY)))
nearest = jax.jit(encode_fp8, static_argnums=1)


def to_8_bits(x):
    return decoded(*encoded(x))


def neighbours_in_16_bits(x):
    """Return the numbers of bfloat16 at x or towards zero, and at x or beyond."""
    toward = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    beyond = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    return toward.astype(np.float64), np.where(toward == x, toward, beyond).astype(np.float64)


def neighbours_in_8_bits(x):
    """The same of e5m2, scaled so that the largest number is in [2^14, 2^15)."""
    scale = 2.0 ** (np.floor(np.log2(np.abs(x).max().astype(np.float64))) - 14)
    size = np.abs(x.astype(np.float64)) / scale
    i = np.searchsorted(GRID, size)
    return np.copysign(GRID[np.where(GRID[i] == size, i, i - 1)] * scale, x), np.copysign(GRID[i] * scale, x)


NORMAL = np.random.default_rng(0).normal(size=64).astype(np.float32)
FORMATS = {
    "bf16": (to_16_bits, neighbours_in_16_bits, NORMAL * np.float32(10.0) ** np.arange(-32, 32)),
    "fp8": (to_8_bits, neighbours_in_8_bits, NORMAL * np.float32(2.0) ** -np.arange(0, 32, 0.5)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_one_of_the_two_neighbours_and_the_mean_is_the_number(name):
    rounded, neighbours, x = FORMATS[name]
    x, many = x.astype(np.float32), 20_000
    found = np.asarray(rounded(jnp.tile(x, (many, 1))), np.float64)  # [many, 64]
    toward, beyond = neighbours(x)
    assert ((found == toward) | (found == beyond)).all()
    above = toward != 0  # only 0 becomes 0, so below the smallest number all are that
    assert above.sum() > 55
    assert (found[:, ~above] == beyond[~above]).all()
    share = ((x - toward) / (beyond - toward))[above]
    sigma = np.sqrt(share * (1 - share) / many)
    assert (np.abs((found == beyond).mean(0)[above] - share) <= 5 * sigma).all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_do_not_depend_on_the_layout(name):
    rounded, x = FORMATS[name][0], jnp.asarray(np.random.default_rng(1).normal(size=(16, 24)), jnp.float32)
    mesh = jzero.make_mesh(zero=8)
    for spec in (P("zero"), P(None, "zero")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        assert (jax.jit(rounded)(placed) == rounded(x)).all()


def test_numbers_of_bfloat16_stay():
    x = np.array(
        [0.0, -0.0, 1.0, -3.0, np.inf, -np.inf, np.nan, 2.0**-126, ml_dtypes.finfo("bfloat16").max], np.float32
    )
    found = np.asarray(to_16_bits(jnp.asarray(x)), np.float32)
    np.testing.assert_array_equal(found, x)
    assert np.signbit(found[1])


def test_zeros_largest_numbers_and_what_is_not_finite():
    assert (to_8_bits(jnp.zeros(8)) == 0).all()
    for largest in (1.0, 1.9999999, 2e38, 1e-37):
        x = jnp.float32([largest, -largest, 0])
        np.testing.assert_allclose(to_8_bits(x), x, rtol=0.25)
    of_gpus = np.uint32(0x7FFFFFFF).view(np.float32)  # NaN as their arithmetic returns it
    for bad in (jnp.nan, of_gpus, jnp.inf, -jnp.inf):
        assert jnp.isnan(to_8_bits(jnp.float32([1.0, 0.0, bad]))).all()


def test_without_random_bits_the_nearest_number_and_each_layer_has_a_scale():
    x = np.random.default_rng(1).normal(size=(3, 20, 50)).astype(np.float32) * np.float32([[[1e-9]], [[1]], [[1e9]]])
    codes, scale = nearest(x, True)
    np.testing.assert_array_equal(scale, 2 ** (np.floor(np.log2(np.abs(x).max((1, 2)))) - 14))
    for layer, of_layer in zip(x, np.asarray(decoded(codes, scale), np.float64), strict=True):
        toward, beyond = neighbours_in_8_bits(layer)
        closest = np.minimum(np.abs(layer - toward), np.abs(beyond - layer))
        np.testing.assert_allclose(np.abs(of_layer - layer), closest, rtol=1e-6)
        assert (decoded(*nearest(layer, False)) == of_layer).all()


def test_arrays_and_steps_have_bits_of_their_own():
    x = jnp.full((64, 64), 1 + 1 / 256, jnp.float32)  # in the middle of two numbers
    first, *others = (
        to_16_bits(x, key, *numbers)
        for key, *numbers in [(KEY,), (KEY, 1), (KEY, 0, 1), (KEY, 0, 2), (jax.random.fold_in(KEY, 1),)]
    )
    for other in others:
        assert 0.45 < float((first == other).mean()) < 0.55
    for rows in (first, first.T):  # nor do neighbours in one dimension go together
        assert 0.45 < float((rows[1:] == rows[:-1]).mean()) < 0.55


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2])
def test_moments_and_parameters_have_random_bits_of_their_own(dtype, monkeypatch):
    """Two parameters with one gradient: four moments whose numbers lie in the middle of two."""
    monkeypatch.setattr(moments, "FP8_LEAST", SMALL)
    params = {"a": jnp.zeros(SMALL), "b": jnp.zeros(SMALL)}
    middle, top = (1.125, 1.25) if dtype == jnp.float8_e5m2 else (1 + 1 / 256, 1 + 1 / 128)
    grads = jax.tree.map(lambda x: x.at[:].set(middle).at[0].set(top), params)
    tx = in_fp32(optax.chain(optax.trace(0.5), optax.trace(0.5)), state_format(dtype))
    _, state = tx.update(grads, tx.init(params), params, rounding=KEY)
    found = jax.tree.leaves(getattr(state, "codes", state))
    assert len(found) == 4
    for i, x in enumerate(found):
        assert x.dtype == dtype
        assert 0.45 < float((x == x[1:].max()).mean()) < 0.55
        for other in found[:i]:
            assert 0.45 < float((x == other).mean()) < 0.55


def test_small_arrays_stay_and_a_state_without_large_ones_is_as_without_fp8(monkeypatch):
    monkeypatch.setattr(moments, "FP8_LEAST", SMALL)
    params = {"small": jnp.zeros((3, SMALL - 1)), "large": jnp.zeros((3, SMALL))}
    tx = in_fp32(optax.trace(0.9), state_format(jnp.float8_e5m2, stacked=True))
    state = tx.init(params)
    assert (state.codes.trace["small"].dtype, state.codes.trace["large"].dtype) == (jnp.float32, jnp.float8_e5m2)
    assert {name: x.shape for name, x in state.scales.items()} == {"trace/large": (3,)}
    assert isinstance(tx.init({"small": params["small"]}), optax.TraceState)


def test_a_new_state_is_not_computed_by_the_compiler():
    """XLA folds constants element by element, and the maximum of a new moment is one."""
    tx = in_fp32(optax.trace(0.9), state_format(jnp.float8_e5m2))
    params = {"w": jax.ShapeDtypeStruct((2**12, 2**12), jnp.float32)}
    program = jax.jit(tx.init).lower(params).compile().as_text()
    assert re.search(r" reduce\(|reduce[\w.]*fusion", program), program
