"""The casts to fp8: the kernel in Pallas' interpreter beside NumPy and ml_dtypes."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.sampling import sample
from jax.experimental import pallas as pl

from jzero.kernels.fp8 import matmul
from jzero.kernels.fp8.matmul import cast_pair, identity
from jzero.kernels.fp8.quantized import E4M3, E5M2, amax

TYPES = {E4M3: (ml_dtypes.float8_e4m3fn, 448.0), E5M2: (ml_dtypes.float8_e5m2, 57344.0)}
SCALE = 4.0


def swiglu(a, b):
    return [a * jax.nn.sigmoid(a) * b]


def both(a, b, g):
    """A function with two results of three parts."""
    return [a * g, b + g]


def by_numpy(f, parts):
    a, *rest = parts
    if f is swiglu:
        return [a / (1 + np.exp(-a)) * rest[0]]
    return [a] if f is identity else [a * rest[1], rest[0] + rest[1]]


@pytest.mark.parametrize(
    ("kernel", "f", "dtype"),
    sample(product([True, False], [identity, swiglu, both], [E4M3, E5M2])),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_cast_its_transpose_and_its_largest_element(kernel, f, dtype, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    rng, parts = np.random.default_rng(0), {identity: (1,), swiglu: (2,), both: (2, 1)}[f]
    xs = [jnp.asarray(rng.normal(size=(64, p, 256)), jnp.bfloat16) for p in parts]
    xs[0] = xs[0].at[33, 0, 200].set(300.0)  # out of e4m3's range at this scale
    ours, most = TYPES[dtype]
    expected = np.concatenate(by_numpy(f, [np.asarray(x, np.float32)[:, p] for x in xs for p in range(x.shape[1])]), 1)
    results = jax.ShapeDtypeStruct(expected.shape, dtype)
    assert matmul.supports_cast([x.shape for x in xs], results.shape)
    scale = jnp.float32(SCALE)
    for with_amax in (False, True):
        if kernel:
            found = matmul.tiled_cast_pair(f, *xs, scale, dtype=dtype, with_amax=with_amax)
        else:
            found = cast_pair(f, xs, scale, dtype, with_amax)
        assert len(found) == 2 + with_amax
        x8, transposed = (np.asarray(x, np.float32) for x in found[:2])
        np.testing.assert_array_equal(transposed, x8.T)
        rounded = np.clip(expected * SCALE, -most, most).astype(ours).astype(np.float32)
        # exp differs in float32's last digits, so that a number on a border may be rounded to the other side
        apart = np.mean(x8 != rounded)
        assert apart == 0 if f is not swiglu else apart < 1e-3
        np.testing.assert_allclose(x8, rounded, rtol=0.26, atol=1e-6)  # neighbours in e5m2 are up to a quarter apart
        if with_amax:
            assert float(found[2]) == pytest.approx(np.abs(expected).max(), rel=1e-6)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_largest_element_is_not_finite(value):
    """A maximum of floating-point numbers may drop NaN."""
    x = jnp.ones((64, 256)).at[1, 2].set(value)
    assert not np.isfinite(amax(x))
    assert not np.isfinite(amax(jnp.ones((64, 256)), x))
    np.testing.assert_array_equal(np.isfinite(amax(x, axis=(1,))), np.arange(64) != 1)
    np.testing.assert_array_equal(amax(-x[2:], axis=(0, 1)), 1)
